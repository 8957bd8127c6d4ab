"""Log-probabilities of prompts over gRPC: with the first token of choice 0, and not again."""

import grpc
import pytest
from gateway_fake_scheduler import Delta, Entry, choice_end, deltas
from gateway_stack import Stack, info_of

from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb

_PROMPT = [5, 6, 7]
# Of the second and the third token.
_ENTRIES = [[Entry(6, -1.5, 3), Entry(2, -0.5, 1)], [Entry(7, -0.25, 1), Entry(7, -0.25, 1)]]


def params(**changes: object) -> pb.SamplingParams:
    return pb.SamplingParams(prompt_logprobs=1, **changes)


def first(
    wanted: scheduler_pb2.Submission | scheduler_pb2.Attachment, *token_ids: int, choice: int = 0
) -> scheduler_pb2.TokenDeltas:
    of_prompt = [] if choice else _ENTRIES
    return deltas(Delta(wanted, 0, token_ids, choice, prompt_logprobs=of_prompt))


def entries(message: object) -> list[list[tuple[int, float, int]]]:
    """Of every token of the prompt; the first is empty."""
    return [
        [(one.token_id, one.logprob, one.rank) for one in (found.sampled, *found.top)]
        if found.HasField("sampled")
        else []
        for found in message.prompt_logprobs  # type: ignore[attr-defined]
    ]


_EXPECTED = [[], *([tuple(entry) for entry in token] for token in _ENTRIES)]


async def test_a_response_has_one_per_token_of_the_prompt(stack: Stack) -> None:
    ids = pb.TokenIds(ids=_PROMPT)
    call = stack.inference.Generate(pb.GenerateRequest(token_ids=ids, sampling_params=params()))
    sent = await stack.scheduler.submissions.get()
    assert (sent.params.num_prompt_logprobs, sent.params.num_logprobs) == (2, 0)
    stack.scheduler.accept(sent)
    stack.scheduler.send(deltas=first(sent, 3, 4), choice_ends=[choice_end(sent, 2)])
    response = await call
    assert entries(response) == _EXPECTED
    assert response.prompt_logprobs[1].sampled.text == stack.gateway.served.get(
        None
    ).vocabulary.decode([6])


async def test_a_prompt_of_one_token_has_an_empty_one(stack: Stack) -> None:
    ids = pb.TokenIds(ids=[5])
    call = stack.inference.Generate(pb.GenerateRequest(token_ids=ids, sampling_params=params()))
    sent = await stack.scheduler.submissions.get()
    stack.scheduler.accept(sent)
    stack.scheduler.write(sent, 0, [3])
    stack.scheduler.end(sent, 1)
    assert entries(await call) == [[]]


async def test_a_stream_has_them_in_the_message_with_the_first_token(stack: Stack) -> None:
    """No token precedes them, even if another choice is faster."""
    call = stack.inference.StreamGenerate(
        pb.StreamGenerateRequest(
            token_ids=pb.TokenIds(ids=_PROMPT), sampling_params=params(n=2), request_id="mine"
        )
    )
    sent = await stack.scheduler.submissions.get()
    stack.scheduler.accept(sent)
    stack.scheduler.send(
        deltas=first(sent, 8, choice=1), choice_ends=[choice_end(sent, 1, choice=1)]
    )
    stack.scheduler.send(deltas=first(sent, 3))
    stack.scheduler.write(sent, 1, [4])
    stack.scheduler.end(sent, 2)
    messages = [message async for message in call]
    [place] = [at for at, message in enumerate(messages) if message.prompt_logprobs]
    assert entries(messages[place]) == _EXPECTED
    assert not any(message.deltas for message in messages[:place])
    found = {0: [], 1: []}
    for message in messages:
        for delta in message.deltas:
            found[delta.index] += delta.token_ids
    assert found == {0: [3, 4], 1: [8]}


@pytest.mark.parametrize("next_index", [0, 1])
async def test_a_resumed_stream_has_them_unless_the_client_has_the_first_token(
    stack: Stack, next_index: int
) -> None:
    started = stack.inference.StreamGenerate(
        pb.StreamGenerateRequest(
            token_ids=pb.TokenIds(ids=_PROMPT),
            sampling_params=params(),
            request_id="mine",
            resume_window_s=30,
        )
    )
    sent = await stack.scheduler.submissions.get()
    stack.scheduler.accept(sent)
    await started.read()
    started.cancel()
    call = stack.inference.ResumeGenerate(
        pb.ResumeGenerateRequest(request_id="mine", next_token_indices=[next_index])
    )
    attachment = await stack.scheduler.attachments.get()
    stack.scheduler.accept(attachment, sent.opaque)
    stack.scheduler.send(deltas=first(attachment, 3, 4), choice_ends=[choice_end(attachment, 2)])
    messages = [message async for message in call]
    found = [entries(message) for message in messages if message.prompt_logprobs]
    assert found == ([] if next_index else [_EXPECTED])


async def test_more_than_a_message_holds_are_refused(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway_svc.generation.validation.MAX_LOGPROBS", 20)

    async def refused(**changes: object) -> str:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1] * 6), sampling_params=pb.SamplingParams(**changes)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.inference.Generate(request)
        assert info_of(caught.value).reason == "TOO_MANY_LOGPROBS"
        return caught.value.details() or ""

    assert "at most 2" in await refused(prompt_logprobs=3)
    assert "at most 2 is allowed" in await refused(prompt_logprobs=2, logprobs=0, max_tokens=3)

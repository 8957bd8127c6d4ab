"""Unary calls with deferred delivery: their tokens are not needed before the end."""

import asyncio

import pytest
from gateway_fake_scheduler import Delta, Entry, choice_end, deltas
from gateway_stack import Stack
from waiting import until

from gateway_svc.generation.choice import Choice
from gateway_svc.scheduler.events import Accepted, Ended, NewTokens
from gateway_svc.scheduler.request_stream import RequestStream
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.v1 import conversation_pb2
from quire.v1 import inference_pb2 as pb

TEXT = "brown fox jumps"


@pytest.mark.parametrize(
    ("stop", "is_deferred"), [([], True), (["STOP"], False)], ids=["no stop", "stop string"]
)
async def test_unary_calls_without_stop_strings_are_deferred(
    stack: Stack, stop: list[str], is_deferred: bool
) -> None:
    """With a stop string, deferred tokens would let the worker generate past it."""
    params = pb.SamplingParams(stop=stop)
    ids = stack.encode(TEXT)
    unary = stack.inference.Generate(pb.GenerateRequest(text="x", sampling_params=params))
    assert (await stack.scheduler.serve_one(ids)).deferred_delivery is is_deferred
    stream = stack.inference.StreamGenerate(
        pb.StreamGenerateRequest(text="x", sampling_params=params)
    )
    assert not (await stack.scheduler.serve_one(ids)).deferred_delivery
    assert (await unary).choices[0].text == TEXT
    assert "".join([d.text async for r in stream for d in r.deltas]) == TEXT


async def test_requests_and_resumptions_have_the_interval_of_the_settings(stack: Stack) -> None:
    ids = stack.encode(TEXT)
    params = pb.SamplingParams(max_tokens=len(ids))
    stream = stack.inference.StreamGenerate(
        pb.StreamGenerateRequest(
            text="x", request_id="one", resume_window_s=5, sampling_params=params
        )
    )
    submission = await stack.scheduler.serve_one(ids)
    assert submission.stream_interval == 3
    assert "".join([d.text async for r in stream for d in r.deltas]) == TEXT
    resumed = stack.inference.ResumeGenerate(pb.ResumeGenerateRequest(request_id="one"))
    attachment = await stack.scheduler.attachments.get()
    assert attachment.stream_interval == 3
    resumed.cancel()


async def test_the_response_has_the_tokens_of_a_prompt_that_was_tokenized_here(
    stack: Stack,
) -> None:
    message = conversation_pb2.Message(role="user", content="x")
    for prompt, is_returned in (
        (pb.GenerateRequest(text="The brown fox"), True),
        (pb.GenerateRequest(conversation=conversation_pb2.Conversation(messages=[message])), True),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6])), False),
    ):
        call = stack.inference.Generate(prompt)
        submission = await stack.scheduler.serve_one(stack.encode(TEXT))
        expected = list(submission.prompt_token_ids) if is_returned else []
        assert list((await call).prompt_token_ids) == expected


async def test_the_response_has_all_tokens_delivered_in_pieces(stack: Stack) -> None:
    """Two choices with log-probabilities, delivered a few tokens at a time."""
    ids = [stack.encode(TEXT), stack.encode("The lazy dog runs over it")]
    params = pb.SamplingParams(n=2, logprobs=0)
    call = stack.inference.Generate(pb.GenerateRequest(text="x", sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    for first in range(0, max(map(len, ids)), 3):
        entries = []
        for choice in (0, 1):
            piece = ids[choice][first : first + 3]
            logprobs = [[Entry(id_, -0.5 - index, 1)] for index, id_ in enumerate(piece)]
            if piece:
                entries.append(Delta(submission, first, piece, choice, logprobs))
        stack.scheduler.send(deltas=deltas(*entries))
    stack.scheduler.send(
        choice_ends=[choice_end(submission, len(ids[choice]), choice=choice) for choice in (1, 0)]
    )
    response = await call
    assert [choice.index for choice in response.choices] == [0, 1]
    assert [list(choice.token_ids) for choice in response.choices] == ids
    assert [choice.text for choice in response.choices] == [TEXT, "The lazy dog runs over it"]
    for choice in response.choices:
        assert [entry.sampled.token_id for entry in choice.logprobs] == list(choice.token_ids)
        assert choice.finish_reason == pb.FINISH_REASON_LENGTH
    assert response.usage.completion_tokens == sum(map(len, ids))


async def test_a_deferred_request_is_attached_again_from_its_next_token(stack: Stack) -> None:
    ids = stack.encode(TEXT) * 4
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    first = await stack.scheduler.submissions.get()
    stack.scheduler.accept(first)
    stack.scheduler.write(first, 0, ids[:1])
    stack.scheduler.write(first, 1, ids[1:5])
    [stream] = stack.gateway.scheduler.requests.streams
    await until(lambda: stream.next_indices == [5], "the tokens")
    stack.scheduler.drop_stream()
    again = await asyncio.wait_for(stack.scheduler.submissions.get(), 10)
    assert (again.deferred_delivery, again.again, list(again.next_indices)) == (True, True, [5])
    stack.scheduler.accept(again)
    stack.scheduler.write(again, 5, ids[5:])
    stack.scheduler.end(again, len(ids))
    assert (await call).choices[0].text == TEXT * 4


async def test_deferred_tokens_do_not_count_towards_the_bound(stack: Stack) -> None:
    """More tokens in one frame than the queue of a stream may hold."""
    ids = stack.encode("a") * 30_000
    call = stack.inference.Generate(pb.GenerateRequest(text="x"))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    await until(
        lambda: all(s.was_accepted for s in stack.gateway.scheduler.requests.streams),
        "the acceptance",
    )
    stack.scheduler.write(submission, 0, ids)
    stack.scheduler.end(submission, len(ids))
    assert (await call).usage.completion_tokens == len(ids)


async def test_a_deferred_call_wakes_rarely(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    num_wakes = 0
    process = Choice.process

    def counting(self: Choice, events: list[NewTokens | Ended]) -> object:
        nonlocal num_wakes
        num_wakes += 1
        return process(self, events)

    monkeypatch.setattr(Choice, "process", counting)
    ids = stack.encode(TEXT) * 5
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    [stream] = stack.gateway.scheduler.requests.streams
    for index, id_ in enumerate(ids):
        stack.scheduler.write(submission, index, [id_])
        await until(lambda at=index: stream.next_indices == [at + 1], "the token")
    stack.scheduler.end(submission, len(ids))
    assert list((await call).choices[0].token_ids) == ids
    # The first token, and the rest.
    assert num_wakes == 2


class TestRequestStream:
    def stream(self, num_choices: int = 1) -> RequestStream:
        state = gateway_pb2.ResumeState(num_choices=num_choices)
        wanted = scheduler_pb2.Submission(deferred_delivery=True)
        return RequestStream(wanted, state, 10, lambda: None)

    async def test_get_waits_for_the_minimum_of_tokens(self) -> None:
        stream = self.stream()
        taking = asyncio.ensure_future(stream.get(min_tokens=3))
        stream.accept(scheduler_pb2.Acceptance())
        stream.put(NewTokens(0, 0, (5, 6)))
        await asyncio.sleep(0)
        assert not taking.done()
        stream.put(NewTokens(0, 2, (7,)))
        assert await taking == [Accepted(), NewTokens(0, 0, (5, 6)), NewTokens(0, 2, (7,))]

    async def test_tokens_queued_before_count_towards_the_minimum(self) -> None:
        stream = self.stream()
        stream.put(NewTokens(0, 0, (5,)))
        assert len(await stream.get()) == 1
        stream.put(NewTokens(0, 1, (6,)))
        taking = asyncio.ensure_future(stream.get(min_tokens=2))
        await asyncio.sleep(0)
        assert not taking.done()
        stream.put(NewTokens(0, 2, (7,)))
        assert len(await taking) == 2

    async def test_events_are_kept_when_their_reader_is_cancelled(self) -> None:
        stream = self.stream()
        for is_woken in (False, True):
            taking = asyncio.ensure_future(stream.get())
            await asyncio.sleep(0)
            if is_woken:
                stream.put(NewTokens(0, 0, (5, 6)))
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
        stream.put(NewTokens(0, 1, (6, 7)))
        assert await stream.get() == [NewTokens(0, 0, (5, 6)), NewTokens(0, 2, (7,))]

    async def test_get_returns_at_the_end_of_all_choices_and_on_errors(self) -> None:
        stream = self.stream(num_choices=2)
        ends = [Ended(choice, 1, None, 0, 0) for choice in (0, 1)]
        taking = asyncio.ensure_future(stream.get(min_tokens=9))
        stream.put(ends[0])
        await asyncio.sleep(0)
        assert not taking.done()
        stream.put(ends[1])
        assert await taking == ends
        failed = self.stream()
        taking = asyncio.ensure_future(failed.get(min_tokens=9))
        await asyncio.sleep(0)
        error = RuntimeError("over")
        failed.fail(error)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await taking

"""Unary calls, of which nobody sees a token before the end."""

import asyncio

import pytest
from gateway_fake_scheduler import Delta, Entry, choice_end, deltas
from gateway_stack import Stack
from waiting import until

from gateway_svc import request_stream
from gateway_svc.choice import Choice
from gateway_svc.request_stream import Accepted, Ended, NewTokens, RequestStream
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.v1 import inference_pb2 as pb

TEXT = "brown fox jumps"


@pytest.mark.parametrize(
    ("stop", "is_patient"), [([], True), (["STOP"], False)], ids=["no stop", "stop string"]
)
async def test_who_is_patient(stack: Stack, stop: list[str], is_patient: bool) -> None:
    """Where a stop string may end it, the worker would write on while tokens are gathered."""
    params = pb.SamplingParams(stop=stop)
    ids = stack.encode(TEXT)
    unary = stack.inference.Generate(pb.GenerateRequest(text="x", sampling_params=params))
    assert (await stack.scheduler.serve_one(ids)).patient is is_patient
    stream = stack.inference.StreamGenerate(
        pb.StreamGenerateRequest(text="x", sampling_params=params)
    )
    assert not (await stack.scheduler.serve_one(ids)).patient
    assert (await unary).choices[0].text == TEXT
    assert "".join([d.text async for r in stream for d in r.deltas]) == TEXT


async def test_an_answer_has_all_that_came_in_pieces(stack: Stack) -> None:
    """Two choices with log-probabilities, the tokens of which come a few at a time."""
    ids = [stack.encode(TEXT), stack.encode("The lazy dog runs over it")]
    params = pb.SamplingParams(n=2, logprobs=0)
    call = stack.inference.Generate(pb.GenerateRequest(text="x", sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    for first in range(0, max(map(len, ids)), 3):
        entries = []
        for choice in (0, 1):
            piece = ids[choice][first : first + 3]
            told = [[Entry(id_, -0.5 - index, 1)] for index, id_ in enumerate(piece)]
            if piece:
                entries.append(Delta(submission, first, piece, choice, told))
        stack.scheduler.say(deltas=deltas(*entries))
    stack.scheduler.say(
        choice_ends=[choice_end(submission, len(ids[choice]), choice=choice) for choice in (1, 0)]
    )
    response = await call
    assert [choice.index for choice in response.choices] == [0, 1]
    assert [list(choice.token_ids) for choice in response.choices] == ids
    assert [choice.text for choice in response.choices] == [TEXT, "The lazy dog runs over it"]
    for choice in response.choices:
        assert [told.sampled.token_id for told in choice.logprobs] == list(choice.token_ids)
        assert choice.finish_reason == pb.FINISH_REASON_LENGTH
    assert response.usage.completion_tokens == sum(map(len, ids))


async def test_it_is_asked_for_again_as_patient_from_what_has_gathered(stack: Stack) -> None:
    ids = stack.encode(TEXT) * 4
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    first = await stack.scheduler.submissions.get()
    stack.scheduler.accept(first)
    stack.scheduler.write(first, 0, ids[:1])
    stack.scheduler.write(first, 1, ids[1:5])
    [stream] = stack.gateway.link.requests._streams.values()
    await until(lambda: stream.next_indices == [5], "the tokens")
    stack.scheduler.drop_stream()
    again = await asyncio.wait_for(stack.scheduler.submissions.get(), 10)
    assert (again.patient, again.again, list(again.next_indices)) == (True, True, [5])
    stack.scheduler.accept(again)
    stack.scheduler.write(again, 5, ids[5:])
    stack.scheduler.end(again, len(ids))
    assert (await call).choices[0].text == TEXT * 4


async def test_nobody_is_too_slow_for_what_nobody_reads(stack: Stack) -> None:
    """More tokens than the queue of a stream may have, in one frame."""
    ids = stack.encode("a") * 30_000
    call = stack.inference.Generate(pb.GenerateRequest(text="x"))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    await until(
        lambda: all(s.was_accepted for s in stack.gateway.link.requests._streams.values()),
        "the acceptance",
    )
    stack.scheduler.write(submission, 0, ids)
    stack.scheduler.end(submission, len(ids))
    assert (await call).usage.completion_tokens == len(ids)


async def test_a_call_wakes_for_few_pieces(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    num_wakes = 0
    take = Choice.take

    def counting(self: Choice, events: list[NewTokens | Ended]) -> object:
        nonlocal num_wakes
        num_wakes += 1
        return take(self, events)

    monkeypatch.setattr(Choice, "take", counting)
    ids = stack.encode(TEXT) * 5
    call = asyncio.ensure_future(stack.inference.Generate(pb.GenerateRequest(text="x")))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    [stream] = stack.gateway.link.requests._streams.values()
    for index, id_ in enumerate(ids):
        stack.scheduler.write(submission, index, [id_])
        await until(lambda at=index: stream.next_indices == [at + 1], "the token")
    stack.scheduler.end(submission, len(ids))
    assert list((await call).choices[0].token_ids) == ids
    # The first token, and the rest.
    assert num_wakes == 2


class TestRequestStream:
    def stream(self, num_choices: int = 1) -> RequestStream:
        state = gateway_pb2.StreamState(num_choices=num_choices)
        wanted = scheduler_pb2.Submission(patient=True)
        return RequestStream(wanted, state, 10, lambda: None)

    async def test_whoever_waits_for_many_tokens_wakes_when_they_are_there(self) -> None:
        stream = self.stream()
        taking = asyncio.ensure_future(stream.take(at_least=3))
        stream.accept(scheduler_pb2.Acceptance())
        stream.put(NewTokens(0, 0, (5, 6)))
        await asyncio.sleep(0)
        assert not taking.done()
        stream.put(NewTokens(0, 2, (7,)))
        assert await taking == [Accepted(), NewTokens(0, 0, (5, 6)), NewTokens(0, 2, (7,))]

    async def test_what_came_before_counts(self) -> None:
        stream = self.stream()
        stream.put(NewTokens(0, 0, (5,)))
        assert len(await stream.take()) == 1
        stream.put(NewTokens(0, 1, (6,)))
        taking = asyncio.ensure_future(stream.take(at_least=2))
        await asyncio.sleep(0)
        assert not taking.done()
        stream.put(NewTokens(0, 2, (7,)))
        assert len(await taking) == 2

    async def test_it_wakes_for_the_end_of_all_choices_and_for_errors(self) -> None:
        stream = self.stream(num_choices=2)
        ends = [request_stream.Ended(choice, 1, None, 0, 0) for choice in (0, 1)]
        taking = asyncio.ensure_future(stream.take(at_least=9))
        stream.put(ends[0])
        await asyncio.sleep(0)
        assert not taking.done()
        stream.put(ends[1])
        assert await taking == ends
        failed = self.stream()
        taking = asyncio.ensure_future(failed.take(at_least=9))
        await asyncio.sleep(0)
        error = RuntimeError("over")
        failed.fail(error)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await taking

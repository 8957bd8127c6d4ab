"""Several choices of one request: streamed together, ended one by one."""

import grpc
import pytest
from gateway_fake_scheduler import Delta, choice_end, deltas
from gateway_stack import Stack, shard_requests

from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb

TEXTS = ("brown fox", "🦊 jumps over", "Größe")


def request(n: int, **params: object) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(text="The", sampling_params=pb.SamplingParams(n=n, **params))


async def written(call: grpc.aio.UnaryStreamCall) -> tuple[list[list[pb.ChoiceDelta]], pb.Usage]:
    """The deltas of each choice, and the usage; asserts the invariants of every stream."""
    responses = [response async for response in call]
    assert not any(response.HasField("usage") for response in responses[:-1])
    by_choice: dict[int, list[pb.ChoiceDelta]] = {}
    for response in responses:
        indices = [delta.index for delta in response.deltas]
        assert indices == sorted(set(indices))
        for delta in response.deltas:
            by_choice.setdefault(delta.index, []).append(delta)
    for parts in by_choice.values():
        num_tokens = 0
        for part in parts:
            assert part.first_token_index == num_tokens
            num_tokens += len(part.token_ids)
        assert [part for part in parts if part.finish_reason] == parts[-1:]
    return [by_choice[index] for index in range(len(by_choice))], responses[-1].usage


def text_of(parts: list[pb.ChoiceDelta]) -> str:
    return "".join(part.text for part in parts)


def tokens_of(parts: list[pb.ChoiceDelta]) -> list[int]:
    return [id_ for part in parts for id_ in part.token_ids]


async def test_choices_are_streamed_together_and_end_in_any_order(stack: Stack) -> None:
    ids = [stack.encode(text) for text in TEXTS]
    call = stack.inference.StreamGenerate(request(3))
    submission = await stack.scheduler.submissions.get()
    assert submission.n == 3
    stack.scheduler.accept(submission)
    for at in range(max(map(len, ids))):
        entries = [
            Delta(submission, at, ids[choice][at : at + 1], choice)
            for choice in (2, 0, 1)
            if at < len(ids[choice])
        ]
        stack.scheduler.send(deltas=deltas(*entries))
    for choice in (1, 2, 0):
        stack.scheduler.end(
            submission, len(ids[choice]), choice=choice, num_cached_prompt_tokens=choice + 1
        )
    parts, usage = await written(call)
    assert tuple(map(text_of, parts)) == TEXTS
    assert list(map(tokens_of, parts)) == ids
    assert usage == pb.Usage(
        prompt_tokens=len(submission.prompt_token_ids),
        cached_prompt_tokens=1,
        completion_tokens=sum(map(len, ids)),
    )


async def test_one_message_carries_one_frame_of_all_choices(stack: Stack) -> None:
    ids = [stack.encode(text) for text in TEXTS]
    call = stack.inference.StreamGenerate(request(3))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    await call.read()
    entries = (Delta(submission, 0, ids[choice], choice) for choice in (1, 0, 2))
    stack.scheduler.send(deltas=deltas(*entries), choice_ends=[choice_end(submission, len(ids[0]))])
    response = await call.read()
    assert [(delta.index, delta.text) for delta in response.deltas] == list(enumerate(TEXTS))
    assert [delta.finish_reason for delta in response.deltas] == [pb.FINISH_REASON_LENGTH, 0, 0]
    assert not response.HasField("usage")
    stack.scheduler.end(submission, len(ids[2]), choice=2)
    [delta] = (await call.read()).deltas
    assert (delta.index, delta.text) == (2, "")
    stack.scheduler.end(submission, len(ids[1]), choice=1)
    assert (await call.read()).HasField("usage")
    assert await call.read() == grpc.aio.EOF


async def test_generate_returns_all_choices_in_order(stack: Stack) -> None:
    ids = [stack.encode(text) for text in TEXTS]
    params = pb.SamplingParams(n=3)
    call = stack.inference.Generate(pb.GenerateRequest(text="The", sampling_params=params))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    for choice in (2, 1, 0):
        stack.scheduler.write(submission, 0, ids[choice], choice)
        stack.scheduler.end(submission, len(ids[choice]), choice=choice)
    response = await call
    assert [(choice.index, choice.text) for choice in response.choices] == list(enumerate(TEXTS))
    assert [list(choice.token_ids) for choice in response.choices] == ids
    assert response.usage.completion_tokens == sum(map(len, ids))


async def test_a_stop_string_ends_only_its_choice(stack: Stack) -> None:
    ids = [stack.encode(text) for text in ("one two three", "one STOP two", "STO three")]
    call = stack.inference.StreamGenerate(request(3, stop=["STOP"]))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.accept(submission)
    stack.scheduler.send(deltas=deltas(*(Delta(submission, 0, ids[c][:3], c) for c in range(3))))
    for at in range(3, len(ids[1])):
        stack.scheduler.write(submission, at, ids[1][at : at + 1], choice=1)
    finish = await stack.scheduler.finishes.get()
    assert (finish.attachment, finish.choice) == (submission.attachment, 1)
    kept = ids[1][: finish.num_tokens]
    stack.scheduler.end(
        submission, finish.num_tokens, scheduler_pb2.END_REASON_STOP_STRING, choice=1
    )
    for choice in (0, 2):
        stack.scheduler.write(submission, 3, ids[choice][3:], choice)
        stack.scheduler.end(submission, len(ids[choice]), choice=choice)
    parts, usage = await written(call)
    assert list(map(text_of, parts)) == ["one two three", "one ", "STO three"]
    assert list(map(tokens_of, parts)) == [ids[0], kept, ids[2]]
    assert [choice[-1].stop_string for choice in parts] == ["", "STOP", ""]
    assert usage.completion_tokens == len(ids[0]) + len(kept) + len(ids[2])
    await stack.check_next_request()
    assert stack.scheduler.finishes.empty()


async def test_a_choice_that_has_ended_is_not_finished_again(stack: Stack) -> None:
    ids = stack.encode("ab STOP")
    call = stack.inference.StreamGenerate(request(2, stop=["STOP"]))
    submission = await stack.scheduler.submissions.get()
    # Both are queued when the gateway checks for the stop string.
    stack.scheduler.send(
        deltas=deltas(Delta(submission, 0, ids, choice=1)),
        choice_ends=[choice_end(submission, len(ids), choice=1)],
    )
    stack.scheduler.write(submission, 0, ids[:1])
    stack.scheduler.end(submission, 1)
    parts, _ = await written(call)
    assert list(map(text_of, parts)) == ["a", "ab "]
    assert parts[1][-1].stop_string == "STOP"
    await stack.check_next_request()
    assert stack.scheduler.finishes.empty()


async def test_events_after_the_end_of_a_choice_are_dropped(stack: Stack) -> None:
    ids = stack.encode("abcd")
    call = stack.inference.StreamGenerate(request(2))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.write(submission, 0, ids[:2], choice=1)
    stack.scheduler.end(
        submission,
        2,
        scheduler_pb2.END_REASON_STOP_TOKEN,
        choice=1,
        stop_token_id=ids[1],
    )
    stack.scheduler.write(submission, 2, ids[2:], choice=1)
    stack.scheduler.end(submission, 4, choice=1)
    # Not requested: a third choice.
    stack.scheduler.write(submission, 0, ids, choice=2)
    stack.scheduler.write(submission, 0, ids)
    stack.scheduler.end(submission, 4)
    parts, usage = await written(call)
    assert list(map(tokens_of, parts)) == [ids, ids[:2]]
    assert (parts[1][-1].stop_token_id, usage.completion_tokens) == (ids[1], 6)


async def test_a_failure_ends_the_whole_request(stack: Stack) -> None:
    ids = stack.encode("ab")
    call = stack.inference.StreamGenerate(request(2))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.write(submission, 0, ids)
    stack.scheduler.end(submission, len(ids))
    stack.scheduler.fail(submission, grpc.StatusCode.INTERNAL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert stack.gateway.scheduler.requests.is_idle
    await stack.check_next_request()
    assert stack.scheduler.cancellations.empty()


async def test_a_gap_in_one_choice_attaches_again_for_all(stack: Stack) -> None:
    ids = stack.encode("ab")
    call = stack.inference.StreamGenerate(request(2))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.write(submission, 0, ids[:1])
    stack.scheduler.write(submission, 1, ids[1:], choice=1)
    again = await stack.scheduler.submissions.get()
    assert again.next_indices == [1, 0]
    # Late, of the attachment that was replaced.
    stack.scheduler.write(submission, 1, [5])
    for choice, first in enumerate(again.next_indices):
        stack.scheduler.write(again, first, ids[first:], choice)
        stack.scheduler.end(again, len(ids), choice=choice)
    parts, _ = await written(call)
    assert list(map(tokens_of, parts)) == [ids, ids]


async def test_a_client_that_disconnects_between_the_ends_of_choices_cancels(stack: Stack) -> None:
    ids = stack.encode("ab")
    call = stack.inference.StreamGenerate(request(2))
    submission = await stack.scheduler.submissions.get()
    stack.scheduler.write(submission, 0, ids)
    stack.scheduler.end(submission, len(ids))
    while not (await call.read()).deltas[0].finish_reason:
        pass
    call.cancel()
    assert (await stack.scheduler.cancellations.get()).attachment == submission.attachment


async def test_the_bound_of_queued_tokens_covers_all_choices() -> None:
    """A stream that exceeds it fails and detaches, although one choice ended meanwhile."""
    requests = shard_requests()
    requests.on_connected()
    submission = scheduler_pb2.Submission()
    state = gateway_pb2.ResumeState(num_choices=2)
    overflows: list[bool] = []
    stream = requests.submit(submission, state, lambda: overflows.append(True))
    await requests.send_queue.get()
    entries = [Delta(submission, 0, [5] * 5, choice) for choice in range(2)]
    requests.deliver(scheduler_pb2.ConnectResponse(deltas=deltas(*entries)))
    assert not overflows
    requests.deliver(
        scheduler_pb2.ConnectResponse(
            deltas=deltas(Delta(submission, 5, [5], choice=1)),
            choice_ends=[choice_end(submission, 5)],
        )
    )
    assert overflows == [True]
    late = Delta(submission, 6, [5], choice=1)
    requests.deliver(scheduler_pb2.ConnectResponse(deltas=deltas(late)))
    with pytest.raises(RequestError, match="more than 10 tokens were queued"):
        await stream.get()
    requests.close(stream)
    frame = await requests.send_queue.get()
    [detachment] = frame.detachments
    assert detachment == scheduler_pb2.Detachment(attachment=submission.attachment)
    assert not frame.cancellations
    assert requests.is_idle


async def test_replayed_tokens_do_not_count_towards_the_bound() -> None:
    requests = shard_requests()
    requests.on_connected()
    submission = scheduler_pb2.Submission()
    state = gateway_pb2.ResumeState(num_choices=2)
    stream = requests.submit(submission, state, lambda: None)
    replay = [Delta(submission, 0, [5] * 100, choice) for choice in range(2)]
    acceptance = scheduler_pb2.Acceptance(attachment=submission.attachment)
    requests.deliver(
        scheduler_pb2.ConnectResponse(acceptances=[acceptance], deltas=deltas(*replay))
    )
    for num_tokens in (10, 1):
        assert stream.error is None
        new = Delta(submission, stream.next_indices[0], [5] * num_tokens)
        requests.deliver(scheduler_pb2.ConnectResponse(deltas=deltas(new)))
    assert stream.error is not None

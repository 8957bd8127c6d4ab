"""The send queue: batching into frames, their size and their order."""

import asyncio
from copy import deepcopy

import grpc
import pytest
from gateway_stack import Stack

from gateway_svc.scheduler import send_queue as send_queue_module
from gateway_svc.scheduler.send_queue import FRAME_BYTES, SendQueue, check_size
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb


def submission(attachment: int, num_bytes: int) -> scheduler_pb2.Submission:
    """A little more than `num_bytes`, in tokens of one byte."""
    return scheduler_pb2.Submission(attachment=attachment, prompt_token_ids=[5] * num_bytes)


async def test_one_iteration_of_the_loop_is_one_frame() -> None:
    queue = SendQueue()
    queue.submit(submission(1, 10))
    queue.finish(scheduler_pb2.Finish(attachment=1))
    queue.cancel(scheduler_pb2.Cancellation(attachment=1))
    queue.submit(submission(2, 10))
    frame = await queue.get()
    assert [part.attachment for part in frame.submissions] == [1, 2]
    assert (len(frame.finishes), len(frame.cancellations)) == (1, 1)
    waiting = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.submit(submission(3, 10))
    assert [part.attachment for part in (await waiting).submissions] == [3]


async def test_parts_after_a_frame_wait_for_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue_module, "FRAME_INTERVAL_S", 0.5)
    queue = SendQueue()
    queue.submit(submission(1, 10))
    # The first frame is due at once.
    assert [part.attachment for part in (await queue.get()).submissions] == [1]
    waiting = asyncio.ensure_future(queue.get())
    for attachment in (2, 3, 4):
        queue.submit(submission(attachment, 10))
        for _ in range(3):
            await asyncio.sleep(0)
    assert not waiting.done()
    assert [part.attachment for part in (await waiting).submissions] == [2, 3, 4]


async def test_close_sends_the_rest_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue_module, "FRAME_INTERVAL_S", 3600)
    queue = SendQueue()
    queue.submit(submission(1, 10))
    await queue.get()
    queue.submit(submission(2, 10))
    queue.close()
    assert [part.attachment for part in (await queue.get()).submissions] == [2]
    assert await queue.get() is None


async def test_frames_stay_below_the_message_limit_and_in_order() -> None:
    queue = SendQueue()
    for attachment in range(9):
        queue.submit(submission(attachment, FRAME_BYTES // 4))
        queue.cancel(scheduler_pb2.Cancellation(attachment=attachment))
    queue.submit(submission(9, 10))
    seen: list[int] = []
    while len(seen) < 10:
        frame = await queue.get()
        assert 0 < frame.ByteSize() < INTERNAL_MESSAGE_BYTES // 2
        seen += [part.attachment for part in frame.submissions]
        # A cancellation never precedes its submission.
        assert all(part.attachment in seen for part in frame.cancellations)
    assert seen == list(range(10))


async def test_many_small_parts_stay_below_the_message_limit() -> None:
    queue = SendQueue()
    num_parts = 3 * 10**5
    key = scheduler_pb2.RequestKey(request_id="a" * 50)
    for tag in range(num_parts):
        queue.cancel(scheduler_pb2.Cancellation(request=key, tag=tag))
    seen = 0
    while seen < num_parts:
        frame = await queue.get()
        assert frame.ByteSize() < INTERNAL_MESSAGE_BYTES // 2
        seen += len(frame.cancellations)


async def test_a_submission_beyond_the_frame_size_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        check_size(submission(1, FRAME_BYTES + 1))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value).startswith("prompt: ")
    check_size(submission(2, 10))


async def test_a_closed_queue_returns_its_frames_and_then_none() -> None:
    queue = SendQueue()
    for attachment in range(5):
        queue.submit(submission(attachment, FRAME_BYTES // 2))
    queue.close()
    seen: list[int] = []
    while (frame := await queue.get()) is not None:
        seen += [part.attachment for part in frame.submissions]
    assert seen == list(range(5))
    assert await queue.get() is None


@pytest.mark.slow
async def test_concurrent_large_requests_do_not_end_the_connection(stack: Stack) -> None:
    """More than the message limit at once, while another client's request is live."""
    num_bytes = FRAME_BYTES // 3
    count = INTERNAL_MESSAGE_BYTES // num_bytes + 1
    # Before the call: to make one takes a third of a second on a slow machine.
    large = submission(0, num_bytes)
    call = stack.inference.Generate(pb.GenerateRequest(text="x"))
    other = await stack.scheduler.submissions.get()
    requests = stack.gateway.scheduler.requests
    state = gateway_pb2.ResumeState(num_choices=1)
    streams = [requests.submit(deepcopy(large), state, lambda: None) for _ in range(count)]
    for stream in streams:
        arrived = await asyncio.wait_for(stack.scheduler.submissions.get(), 30)
        assert arrived.attachment == stream.attachment
        requests.close(stream)
    stack.scheduler.write(other, 0, stack.encode("fox"))
    stack.scheduler.end(other, len(stack.encode("fox")))
    assert (await call).choices[0].text == "fox"

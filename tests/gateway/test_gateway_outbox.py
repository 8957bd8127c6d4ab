import asyncio

import grpc
import pytest
from gateway_stack import Stack

from gateway_svc import outbox as outbox_module
from gateway_svc.outbox import FRAME_BYTES, Outbox, check_size
from quire.internal.v1 import gateway_pb2, scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import RequestError
from quire.v1 import inference_pb2 as pb


def submission(attachment: int, num_bytes: int) -> scheduler_pb2.Submission:
    """A little more than `num_bytes`, in tokens of one byte."""
    return scheduler_pb2.Submission(attachment=attachment, prompt_token_ids=[5] * num_bytes)


async def test_one_turn_of_the_loop_is_one_frame() -> None:
    outbox = Outbox()
    outbox.submit(submission(1, 10))
    outbox.finish(scheduler_pb2.Finish(attachment=1))
    outbox.cancel(scheduler_pb2.Cancellation(attachment=1))
    outbox.submit(submission(2, 10))
    frame = await outbox.take()
    assert [part.attachment for part in frame.submissions] == [1, 2]
    assert (len(frame.finishes), len(frame.cancellations)) == (1, 1)
    waiting = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.submit(submission(3, 10))
    assert [part.attachment for part in (await waiting).submissions] == [3]


async def test_what_comes_right_behind_a_frame_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "FRAME_INTERVAL_S", 0.5)
    outbox = Outbox()
    outbox.submit(submission(1, 10))
    # One that is alone goes at once.
    assert [part.attachment for part in (await outbox.take()).submissions] == [1]
    waiting = asyncio.ensure_future(outbox.take())
    for attachment in (2, 3, 4):
        outbox.submit(submission(attachment, 10))
        for _ in range(3):
            await asyncio.sleep(0)
    assert not waiting.done()
    assert [part.attachment for part in (await waiting).submissions] == [2, 3, 4]


async def test_what_is_left_at_the_end_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "FRAME_INTERVAL_S", 3600)
    outbox = Outbox()
    outbox.submit(submission(1, 10))
    await outbox.take()
    outbox.submit(submission(2, 10))
    outbox.close()
    assert [part.attachment for part in (await outbox.take()).submissions] == [2]
    assert await outbox.take() is None


async def test_frames_stay_below_the_links_limit_and_in_order() -> None:
    outbox = Outbox()
    for attachment in range(9):
        outbox.submit(submission(attachment, FRAME_BYTES // 4))
        outbox.cancel(scheduler_pb2.Cancellation(attachment=attachment))
    outbox.submit(submission(9, 10))
    seen: list[int] = []
    while len(seen) < 10:
        frame = await outbox.take()
        assert 0 < frame.ByteSize() < INTERNAL_MESSAGE_BYTES // 2
        seen += [part.attachment for part in frame.submissions]
        # What is said of a submission never overtakes it.
        assert all(part.attachment in seen for part in frame.cancellations)
    assert seen == list(range(10))


async def test_many_small_parts_stay_below_the_links_limit() -> None:
    outbox = Outbox()
    num_parts = 3 * 10**5
    key = scheduler_pb2.RequestKey(request_id="a" * 50)
    for tag in range(num_parts):
        outbox.cancel(scheduler_pb2.Cancellation(request=key, tag=tag))
    seen = 0
    while seen < num_parts:
        frame = await outbox.take()
        assert frame.ByteSize() < INTERNAL_MESSAGE_BYTES // 2
        seen += len(frame.cancellations)


async def test_what_no_frame_holds_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        check_size(submission(1, FRAME_BYTES + 1))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value).startswith("prompt: ")
    check_size(submission(2, 10))


async def test_a_closed_one_gives_what_it_has_and_then_nothing() -> None:
    outbox = Outbox()
    for attachment in range(5):
        outbox.submit(submission(attachment, FRAME_BYTES // 2))
    outbox.close()
    seen: list[int] = []
    while (frame := await outbox.take()) is not None:
        seen += [part.attachment for part in frame.submissions]
    assert seen == list(range(5))
    assert await outbox.take() is None


async def test_requests_of_one_moment_cannot_break_the_link(stack: Stack) -> None:
    """More than the link's limit at once, while another client's text is being written."""
    call = stack.inference.Generate(pb.GenerateRequest(text="x"))
    other = await stack.scheduler.submissions.get()
    requests = stack.gateway.link.requests
    num_bytes = FRAME_BYTES // 3
    count = INTERNAL_MESSAGE_BYTES // num_bytes + 1
    state = gateway_pb2.StreamState(num_choices=1)
    streams = [requests.submit(submission(0, num_bytes), state, lambda: None) for _ in range(count)]
    for stream in streams:
        arrived = await asyncio.wait_for(stack.scheduler.submissions.get(), 30)
        assert arrived.attachment == stream.attachment
        requests.leave(stream)
    stack.scheduler.write(other, 0, stack.encode("fox"))
    stack.scheduler.end(other, len(stack.encode("fox")))
    assert (await call).choices[0].text == "fox"

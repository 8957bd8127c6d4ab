"""Reattached streams: by which gateway, from which index, and within which grace period."""

import time

import pytest
from checking_worker import CheckingWorker
from scheduler_stack import (
    ABORTED,
    CANCELLED,
    NOT_FOUND,
    Gateway,
    Received,
    ReceivedChoice,
    info_of,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import scheduler_pb2


async def has_tokens(received: Received, count: int) -> None:
    await until(lambda: min(received.next_indices) >= count, f"{count} tokens of each choice")


async def submitted(gateway: Gateway, n: int) -> Received:
    """One choice without log-probabilities, or several with some."""
    attachment = await gateway.submit(
        prompt(9), max_tokens=12, n=n, opaque=b"mine", num_logprobs=n - 1
    )
    return gateway.received[attachment]


def indices_of(n: int) -> list[list[int]]:
    return [[0] * n, [3] * n, [4, 1, 0][:n]]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_live_request_is_attached_to_from_any_index_and_the_newest_stream_receives_it(
    redis_url, sockets, n
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        worker.hold_after = 7 * n
        original = await submitted(first, n)
        await has_tokens(original, 4)
        for indices in indices_of(n):
            attachment = await other.attach(original, *indices)
            await until(lambda a=attachment: other.received[a].accepted, "acceptance")
        worker.gate.set()
        *earlier, last = await other.wait_ended()
        assert last.is_whole
        assert last.opaque == b"mine"
        for received in (original, *earlier):
            info = info_of(received.failure)
            assert (received.failure.code, info.reason) == (ABORTED, "TAKEN_OVER")
            assert info.metadata["resumable"] == "true"
        assert worker.num_sampled_tokens == 12 * n
        await worker.check()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_finished_stream_is_replayed_from_any_index_with_its_ends(redis_url, sockets, n):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        original = await submitted(first, n)
        await first.wait_ended()
        for indices in [*indices_of(n), [12] * n]:
            await other.attach(original, *indices)
        await other.submit_again(original)
        for received in await other.wait_ended():
            assert received.is_whole
            assert received.opaque == b"mine"
            for expected, again in zip(original.choices, received.choices, strict=True):
                assert (expected.end.reason, expected.end.num_tokens) == (
                    again.end.reason,
                    again.end.num_tokens,
                )
        assert worker.num_sampled_tokens == 12 * n


async def test_the_end_by_a_stop_string_is_replayed_at_its_index(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        original = first.received[await first.submit(prompt(9), max_tokens=50)]
        await has_tokens(original, 3)
        attachment = original.submission.attachment
        await first.send(
            finishes=[scheduler_pb2.Finish(attachment=attachment, choice=0, num_tokens=2)]
        )
        await first.wait_ended()
        [received] = await other.wait_ended(await other.attach(original))
        assert received.end.reason == scheduler_pb2.END_REASON_STOP_STRING
        assert received.end.num_tokens >= 2
        assert received.token_ids == received.tokens(received.end.num_tokens)


async def test_an_old_gateway_cannot_change_a_request_that_has_moved(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        old, new = await stack.gateway(), await stack.gateway()
        worker.hold_after = 5
        attachment = await old.submit(prompt(9), max_tokens=20)
        original = old.received[attachment]
        await has_tokens(original, 2)
        moved = await new.submit_again(original)
        await until(lambda: new.received[moved].accepted, "acceptance")
        await old.send(
            finishes=[scheduler_pb2.Finish(attachment=attachment, choice=0, num_tokens=1)],
            detachments=[scheduler_pb2.Detachment(attachment=attachment, client_gone=True)],
            cancellations=[scheduler_pb2.Cancellation(attachment=attachment, tag=1)],
        )
        await until(lambda: old.cancelled == {1: False}, "the result")
        await old.close()
        worker.gate.set()
        [received] = await new.wait_ended(moved)
        assert received.is_whole


async def test_an_unknown_or_expired_request_is_not_resumable(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        unknown = Received(scheduler_pb2.Submission(request_id="unknown"), [ReceivedChoice()])
        [received] = await gateway.wait_ended(await gateway.attach(unknown))
        info = info_of(received.failure)
        assert (received.failure.code, info.reason) == (NOT_FOUND, "UNKNOWN_REQUEST")
        assert info.metadata["resumable"] == "false"


async def test_a_cancelled_request_stays_cancelled_unless_a_new_client_submits_it(
    redis_url, sockets
):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        original = gateway.received[
            await gateway.submit(prompt(9), max_tokens=50, request_id="same")
        ]
        await has_tokens(original, 1)
        await gateway.cancel(original.submission.attachment)
        await gateway.wait_ended()
        for attachment in (await gateway.submit_again(original), await gateway.attach(original)):
            [received] = await gateway.wait_ended(attachment)
            assert received.failure.code == CANCELLED
        [received] = await gateway.wait_ended(
            await gateway.submit(prompt(9), max_tokens=5, request_id="same")
        )
        assert received.is_whole


async def test_a_request_that_is_about_to_end_as_cancelled_is_not_taken_over(redis_url, sockets):
    """By who asks for its state, while its reader waits for the end."""
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        worker.hold_after = 3
        original = gateway.received[await gateway.submit(prompt(9), max_tokens=50, opaque=b"mine")]
        await has_tokens(original, 1)
        await until(lambda: worker.is_held_back, "a step that is held back")
        await gateway.cancel(original.submission.attachment)
        [group] = stack.engine.live.values()
        await until(lambda: group.error is not None, "the cancellation")
        [received] = await other.wait_ended(await other.attach(original))
        assert not original.is_ended
        assert (received.failure.code, received.failure.opaque) == (CANCELLED, b"mine")
        worker.gate.set()
        [received] = await gateway.wait_ended()
        assert received.failure.code == CANCELLED


async def test_a_request_begins_again_while_its_cancelled_one_ends(redis_url, sockets):
    """As a client sends it again that has lost its connection, which cancelled it."""
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        again = {"max_tokens": 50, "request_id": "same"}
        original = gateway.received[await gateway.submit(prompt(9), **again)]
        await has_tokens(original, 1)
        await gateway.cancel(original.submission.attachment)
        [received] = await gateway.wait_ended(await gateway.submit(prompt(9), **again))
        while received.failure is not None:
            info = info_of(received.failure)
            assert (info.reason, info.metadata["resumable"]) == ("REQUEST_ENDING", "true")
            [received] = await gateway.wait_ended(await gateway.submit(prompt(9), **again))
        assert received.is_whole


# How a stream ends, the request's windows, and whether it is then cancelled at once. The grace
# period is long where it must not end the request.
LEFT = {
    "a lost gateway": ({}, None, 0),
    "a gateway that drains": ({}, False, 0),
    "a client that disconnects": ({}, True, 0),
    "a client that disconnects, and may resume": ({"resume_window_s": 1}, True, 3600),
    "a deadline that has passed": ({"deadline_ms": 1}, None, 3600),
}


@pytest.mark.parametrize("how", LEFT)
async def test_an_orphan_is_cancelled_after_its_grace_period(redis_url, sockets, how):
    fields, client_gone, orphan_grace_s = LEFT[how]
    worker = CheckingWorker(1)
    async with running_stack(
        redis_url, sockets, {"a": worker}, orphan_grace_s=orphan_grace_s
    ) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        worker.gate.clear()
        original = gateway.received[await gateway.submit(prompt(9), max_tokens=50, **fields)]
        await until(lambda: original.accepted, "acceptance")
        [group] = stack.engine.live.values()
        left_at = time.monotonic()
        if client_gone is None:
            await gateway.close()
        else:
            await gateway.detach(original.submission.attachment, client_gone)
        await until(lambda: group.error is not None, "the end of the grace period")
        worker.gate.set()
        assert time.monotonic() - left_at >= fields.get("resume_window_s", 0)
        [received] = await other.wait_ended(await other.attach(original))
        assert received.failure.code == CANCELLED
        await worker.check()


@pytest.mark.parametrize("client_gone", [None, False, True])
async def test_an_orphan_that_is_attached_in_time_continues(redis_url, sockets, client_gone):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        original = gateway.received[
            await gateway.submit(prompt(9), max_tokens=40, seed=3, resume_window_s=30)
        ]
        await has_tokens(original, 2)
        worker.gate.clear()
        if client_gone is None:
            await gateway.close()
        else:
            await gateway.detach(original.submission.attachment, client_gone)
        orphans = stack.member.term.handler._orphans
        await until(lambda: bool(orphans._timers), "an orphan")
        # It keeps running.
        num_plans = len(worker.plans)
        worker.gate.set()
        await until(lambda: len(worker.plans) > num_plans + 5, "steps without a gateway")
        [received] = await other.wait_ended(await other.submit_again(original))
        assert received.is_whole
        assert not orphans._timers
        assert worker.num_sampled_tokens == 40

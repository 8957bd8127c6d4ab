"""Streams that are taken up again: by whom, from where on, and for how long they wait."""

import time

import pytest
from ledger_worker import LedgerWorker
from scheduler_stack import (
    ABORTED,
    CANCELLED,
    NOT_FOUND,
    Gateway,
    Heard,
    HeardChoice,
    info_of,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import scheduler_pb2


async def has_tokens(heard: Heard, count: int) -> None:
    await until(lambda: min(heard.next_indices) >= count, f"{count} tokens of each choice")


async def submitted(gateway: Gateway, n: int) -> Heard:
    """One choice comes without log-probabilities, several with some."""
    attachment = await gateway.submit(
        prompt(9), max_tokens=12, n=n, opaque=b"mine", num_logprobs=n - 1
    )
    return gateway.heard[attachment]


def indices_of(n: int) -> list[list[int]]:
    return [[0] * n, [3] * n, [4, 1, 0][:n]]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_live_stream_is_attached_to_from_any_index_and_the_newest_one_has_it(
    redis_url, sockets, n
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        asked = await submitted(first, n)
        await has_tokens(asked, 4)
        worker.gate.clear()
        for indices in indices_of(n):
            attachment = await other.attach(asked, *indices)
            await until(lambda a=attachment: other.heard[a].accepted, "acceptance")
        worker.gate.set()
        *former, last = await other.over()
        assert last.is_whole
        assert last.opaque == b"mine"
        for heard in (asked, *former):
            info = info_of(heard.failure)
            assert (heard.failure.code, info.reason) == (ABORTED, "TAKEN_OVER")
            assert info.metadata["resumable"] == "true"
        assert worker.num_sampled_tokens == 12 * n
        await worker.check()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_finished_stream_is_said_again_from_any_index_with_its_ends(redis_url, sockets, n):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        asked = await submitted(first, n)
        await first.over()
        for indices in [*indices_of(n), [12] * n]:
            await other.attach(asked, *indices)
        await other.submit_again(asked)
        for heard in await other.over():
            assert heard.is_whole
            assert heard.opaque == b"mine"
            for said, again in zip(asked.choices, heard.choices, strict=True):
                assert (said.end.reason, said.end.num_tokens) == (
                    again.end.reason,
                    again.end.num_tokens,
                )
        assert worker.num_sampled_tokens == 12 * n


async def test_a_stop_string_s_end_is_said_again_where_it_was(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        asked = first.heard[await first.submit(prompt(9), max_tokens=50)]
        await has_tokens(asked, 3)
        attachment = asked.submission.attachment
        await first.send(
            finishes=[scheduler_pb2.Finish(attachment=attachment, choice=0, num_tokens=2)]
        )
        await first.over()
        [heard] = await other.over(await other.attach(asked))
        assert heard.end.reason == scheduler_pb2.END_REASON_STOP_STRING
        assert heard.end.num_tokens >= 2
        assert heard.token_ids == heard.tokens(heard.end.num_tokens)


async def test_an_old_gateway_cannot_touch_a_stream_that_has_moved(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        old, new = await stack.gateway(), await stack.gateway()
        attachment = await old.submit(prompt(9), max_tokens=20)
        asked = old.heard[attachment]
        await has_tokens(asked, 2)
        worker.gate.clear()
        moved = await new.submit_again(asked)
        await until(lambda: new.heard[moved].accepted, "acceptance")
        await old.send(
            finishes=[scheduler_pb2.Finish(attachment=attachment, choice=0, num_tokens=1)],
            detachments=[scheduler_pb2.Detachment(attachment=attachment, client_gone=True)],
            cancellations=[scheduler_pb2.Cancellation(attachment=attachment, tag=1)],
        )
        await until(lambda: old.cancelled == {1: False}, "the answer")
        await old.close()
        worker.gate.set()
        [heard] = await new.over(moved)
        assert heard.is_whole


async def test_who_is_not_known_or_not_any_more_is_not_resumable(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        unknown = Heard(scheduler_pb2.Submission(request_id="nobody"), [HeardChoice()])
        [heard] = await gateway.over(await gateway.attach(unknown))
        info = info_of(heard.failure)
        assert (heard.failure.code, info.reason) == (NOT_FOUND, "UNKNOWN_REQUEST")
        assert info.metadata["resumable"] == "false"


async def test_a_cancelled_request_says_so_again_and_is_begun_anew_only_by_a_new_client(
    redis_url, sockets
):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        asked = gateway.heard[await gateway.submit(prompt(9), max_tokens=50, request_id="same")]
        await has_tokens(asked, 1)
        await gateway.cancel(asked.submission.attachment)
        await gateway.over()
        for attachment in (await gateway.submit_again(asked), await gateway.attach(asked)):
            [heard] = await gateway.over(attachment)
            assert heard.failure.code == CANCELLED
        [heard] = await gateway.over(
            await gateway.submit(prompt(9), max_tokens=5, request_id="same")
        )
        assert heard.is_whole


# How a stream is left, what the request allows, and whether it is then cancelled at once. The
# grace is long where it must not be what ends the request.
LEFT = {
    "a lost gateway": ({}, None, 0),
    "a gateway that drains": ({}, False, 0),
    "a client that goes": ({}, True, 0),
    "a client that goes, and may come back": ({"resume_window_s": 1}, True, 3600),
    "a deadline that is over": ({"deadline_ms": 1}, None, 3600),
}


@pytest.mark.parametrize("how", LEFT)
async def test_an_orphan_is_cancelled_when_its_time_is_over(redis_url, sockets, how):
    fields, client_gone, orphan_grace_s = LEFT[how]
    worker = LedgerWorker(1)
    async with running_stack(
        redis_url, sockets, {"a": worker}, orphan_grace_s=orphan_grace_s
    ) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        worker.gate.clear()
        asked = gateway.heard[await gateway.submit(prompt(9), max_tokens=50, **fields)]
        await until(lambda: asked.accepted, "acceptance")
        left_at = time.monotonic()
        if client_gone is None:
            await gateway.close()
        else:
            await gateway.detach(asked.submission.attachment, client_gone)
        [group] = stack.engine.live.values()
        await until(lambda: group.error is not None, "the end of the grace")
        worker.gate.set()
        assert time.monotonic() - left_at >= fields.get("resume_window_s", 0)
        [heard] = await other.over(await other.attach(asked))
        assert heard.failure.code == CANCELLED
        await worker.check()


@pytest.mark.parametrize("client_gone", [None, False, True])
async def test_an_orphan_that_somebody_takes_in_time_goes_on(redis_url, sockets, client_gone):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, other = await stack.gateway(), await stack.gateway()
        asked = gateway.heard[
            await gateway.submit(prompt(9), max_tokens=40, seed=3, resume_window_s=30)
        ]
        await has_tokens(asked, 2)
        worker.gate.clear()
        if client_gone is None:
            await gateway.close()
        else:
            await gateway.detach(asked.submission.attachment, client_gone)
        orphans = stack.scheduler._reign.desk._orphans
        await until(lambda: bool(orphans._timers), "an orphan")
        # It runs on meanwhile.
        num_plans = len(worker.plans)
        worker.gate.set()
        await until(lambda: len(worker.plans) > num_plans + 5, "steps without anybody")
        [heard] = await other.over(await other.submit_again(asked))
        assert heard.is_whole
        assert not orphans._timers
        assert worker.num_sampled_tokens == 40

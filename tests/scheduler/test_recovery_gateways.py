"""Gateways that were away, cut off and back; their clients have gone on elsewhere meanwhile."""

import gc

import pytest
import redis
from ledger_worker import LedgerWorker
from scheduler_stack import Heard, info_of, prompt, running_stack
from waiting import until

from scheduler_svc.engine import Engine


@pytest.mark.parametrize("resumed", [False, True], ids=["begun there", "resumed there"])
async def test_a_gateway_that_comes_back_leaves_a_stream_where_its_client_has_gone(
    redis_url, sockets, resumed
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        asked = first.heard[await first.submit(prompt(9), max_tokens=12)]
        await until(lambda: min(asked.next_indices) >= 3, "tokens")
        worker.gate.clear()
        await first.close()
        taken = other.heard[await other.attach(asked, 2)]
        await until(lambda: taken.accepted, "acceptance")
        back = await stack.gateway()
        if resumed:
            known = back.heard[await back.attach_again(asked)]
        else:
            known = back.heard[await back.submit_again(asked)]
        await until(lambda: known.failure is not None, "a refusal")
        assert info_of(known.failure).reason == "TAKEN_OVER"
        worker.gate.set()
        await other.over()
        assert taken.is_whole


@pytest.mark.parametrize("comes_first", ["the old one", "the new one"])
async def test_the_newer_of_two_streams_has_a_request_also_under_the_next_leader(
    redis_url, sockets, comes_first
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        old, new = await stack.gateway(), await stack.gateway()
        asked = old.heard[await old.submit(prompt(9), max_tokens=40)]
        await until(lambda: min(asked.next_indices) >= 3, "tokens")
        moved = new.heard[await new.attach(asked, 2)]
        await until(lambda: len(moved.token_ids) >= 3, "tokens elsewhere")
        former, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.stands_by, "a standby")
        await former.kill()
        stack.lapse()
        worker.gate.clear()
        old, new = await stack.gateway(), await stack.gateway()

        async def old_comes() -> Heard:
            return old.heard[await old.submit_again(asked)]

        async def new_comes() -> Heard:
            return new.heard[await new.attach_again(moved)]

        if comes_first == "the old one":
            ours = await old_comes()
            await until(lambda: ours.accepted, "acceptance")
            theirs = await new_comes()
        else:
            theirs = await new_comes()
            await until(lambda: theirs.accepted, "acceptance")
            ours = await old_comes()
        await until(lambda: ours.failure is not None, "a refusal")
        assert info_of(ours.failure).reason == "TAKEN_OVER"
        worker.gate.set()
        await new.over()
        assert theirs.is_whole


async def test_a_leadership_that_is_over_leaves_nothing_in_memory(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        for _ in range(4):
            gateway = await stack.gateway()
            former = stack.engine
            with redis.Redis.from_url(redis_url) as client:
                client.flushall()
            await until(
                lambda g=gateway, f=former: (
                    g.lost and stack.scheduler.leading and stack.engine is not f
                ),
                "the next leadership",
            )
        del former, gateway
        stack.gateways.clear()

        def engines() -> list[Engine]:
            gc.collect()
            return [one for one in gc.get_objects() if isinstance(one, Engine)]

        # gRPC's server holds its last call, and what that has of the leadership before.
        await until(lambda: len(engines()) <= 2, "the end of former engines")

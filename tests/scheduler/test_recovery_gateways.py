"""Gateways that were away, cut off and back; their clients have gone on elsewhere meanwhile."""

import asyncio
import gc
from typing import Any

import pytest
import redis
from ledger_worker import LedgerWorker
from scheduler_stack import Heard, info_of, prompt, running_stack
from waiting import until

from scheduler_svc.engine import Engine
from scheduler_svc.store.requests import Recorded, RequestKey, StoredRequest
from scheduler_svc.store.store import Store


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


def hold_records(monkeypatch: pytest.MonkeyPatch, count: int) -> list[asyncio.Event]:
    """Answers of that many calls to record are held back until their events are set; an event is
    here when its call has been carried out."""
    record_in, answered = Store.record, []

    async def record(*args: Any) -> list[Recorded]:
        answers = await record_in(*args)
        if len(answered) < count:
            answered.append(asyncio.Event())
            await answered[-1].wait()
        return answers

    monkeypatch.setattr(Store, "record", record)
    return answered


async def test_a_gateway_that_has_gone_before_it_was_answered_does_not_take_a_stream_back(
    redis_url, sockets, monkeypatch
):
    worker = LedgerWorker(1)
    worker.gate.clear()
    answered = hold_records(monkeypatch, 2)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, second, third = [await stack.gateway() for _ in range(3)]
        asked = first.heard[await first.submit(prompt(9), max_tokens=12)]
        await until(lambda: len(answered) == 1, "its record")
        await second.submit_again(asked)
        await until(lambda: len(answered) == 2, "its record's repetition")
        await second.close()
        desk = stack.scheduler._servicer.desk
        await until(lambda: len(desk._connections) == 2, "the end of its stream")
        answered[0].set()
        await until(lambda: asked.accepted, "acceptance")
        taken = third.heard[await third.submit_again(asked)]
        await until(lambda: taken.accepted, "acceptance elsewhere")
        answered[1].set()
        await until(lambda: not desk._submissions._tasks, "the last answer")
        worker.gate.set()
        await third.over()
        assert taken.is_whole


async def test_what_is_forgotten_while_it_is_submitted_again_is_to_be_asked_for_once_more(
    redis_url, sockets, monkeypatch
):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway = await stack.gateway()
        [asked] = await gateway.over(await gateway.submit(prompt(9)))
        load = Store.load

        async def forgotten(store: Store, key: RequestKey) -> StoredRequest | None:
            monkeypatch.setattr(Store, "load", load)
            return None

        monkeypatch.setattr(Store, "load", forgotten)
        [refused] = await gateway.over(await gateway.submit_again(asked))
        assert info_of(refused.failure).reason == "REDIS_AWAY"
        [again] = await gateway.over(await gateway.submit_again(asked))
        assert again.is_whole


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

"""Gateways that lose their connection and return after their clients have resumed elsewhere."""

import asyncio
import gc
from typing import Any

import pytest
import redis
from checking_worker import CheckingWorker
from scheduler_stack import Received, info_of, prompt, running_stack
from waiting import until

from scheduler_svc.engine.engine import Engine
from scheduler_svc.store.requests import RecordOutcome, RequestKey, StoredRequest
from scheduler_svc.store.store import Store


@pytest.mark.parametrize("resumed", [False, True], ids=["begun there", "resumed there"])
async def test_a_returning_gateway_does_not_take_a_stream_from_the_gateway_of_its_client(
    redis_url, sockets, resumed
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, other = await stack.gateway(), await stack.gateway()
        original = first.received[await first.submit(prompt(9), max_tokens=50)]
        await until(lambda: min(original.next_indices) >= 3, "tokens")
        worker.gate.clear()
        await first.close()
        taken = other.received[await other.attach(original, 2)]
        await until(lambda: taken.accepted, "acceptance")
        back = await stack.gateway()
        if resumed:
            known = back.received[await back.attach_again(original)]
        else:
            known = back.received[await back.submit_again(original)]
        await until(lambda: known.failure is not None, "a refusal")
        assert info_of(known.failure).reason == "TAKEN_OVER"
        worker.gate.set()
        await other.wait_ended()
        assert taken.is_whole


@pytest.mark.parametrize("comes_first", ["the old one", "the new one"])
@pytest.mark.slow
async def test_the_newer_of_two_streams_receives_the_request_under_the_next_leader(
    redis_url, sockets, comes_first
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        old, new = await stack.gateway(), await stack.gateway()
        original = old.received[await old.submit(prompt(9), max_tokens=40)]
        await until(lambda: min(original.next_indices) >= 3, "tokens")
        moved = new.received[await new.attach(original, 2)]
        await until(lambda: len(moved.token_ids) >= 3, "tokens elsewhere")
        previous, successor = stack.member, stack.start_scheduler()
        await until(lambda: successor.is_standby, "a standby")
        await previous.kill()
        stack.expire_lease(previous)
        worker.gate.clear()
        old, new = await stack.gateway(), await stack.gateway()

        async def old_comes() -> Received:
            return old.received[await old.submit_again(original)]

        async def new_comes() -> Received:
            return new.received[await new.attach_again(moved)]

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
        await new.wait_ended()
        assert theirs.is_whole


def hold_records(monkeypatch: pytest.MonkeyPatch, count: int) -> list[asyncio.Event]:
    """Hold the replies of the first `count` calls to record until their events are set. An event is
    added when its call has been executed."""
    record_in, held = Store.record, []

    async def record(*args: Any) -> list[RecordOutcome]:
        outcomes = await record_in(*args)
        if len(held) < count:
            held.append(asyncio.Event())
            await held[-1].wait()
        return outcomes

    monkeypatch.setattr(Store, "record", record)
    return held


async def test_a_gateway_disconnected_before_its_response_does_not_take_a_stream_back(
    redis_url, sockets, monkeypatch
):
    worker = CheckingWorker(1)
    worker.gate.clear()
    held = hold_records(monkeypatch, 2)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        first, second, third = [await stack.gateway() for _ in range(3)]
        original = first.received[await first.submit(prompt(9), max_tokens=12)]
        await until(lambda: len(held) == 1, "its record")
        await second.submit_again(original)
        await until(lambda: len(held) == 2, "its record's repetition")
        await second.close()
        handler = stack.member.term.handler
        await until(lambda: len(handler._connections) == 2, "the end of its stream")
        held[0].set()
        await until(lambda: original.accepted, "acceptance")
        taken = third.received[await third.submit_again(original)]
        await until(lambda: taken.accepted, "acceptance elsewhere")
        held[1].set()
        await until(lambda: not handler._submissions._tasks, "the last response")
        worker.gate.set()
        await third.wait_ended()
        assert taken.is_whole


async def test_a_record_that_expires_during_a_submission_makes_the_gateway_retry(
    redis_url, sockets, monkeypatch
):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway = await stack.gateway()
        [original] = await gateway.wait_ended(await gateway.submit(prompt(9)))
        load = Store.load

        async def forgotten(store: Store, key: RequestKey) -> StoredRequest | None:
            monkeypatch.setattr(Store, "load", load)
            return None

        monkeypatch.setattr(Store, "load", forgotten)
        [refused] = await gateway.wait_ended(await gateway.submit_again(original))
        assert info_of(refused.failure).reason == "REDIS_AWAY"
        [again] = await gateway.wait_ended(await gateway.submit_again(original))
        assert again.is_whole


@pytest.mark.slow
async def test_an_ended_term_leaves_nothing_in_memory(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        for _ in range(4):
            gateway = await stack.gateway()
            previous = stack.engine
            with redis.Redis.from_url(redis_url) as client:
                client.flushall()
            await until(
                lambda g=gateway, f=previous: (
                    g.lost and stack.member.is_leading and stack.engine is not f
                ),
                "the next leadership",
            )
        del previous, gateway
        stack.gateways.clear()

        def engines() -> list[Engine]:
            gc.collect()
            return [one for one in gc.get_objects() if isinstance(one, Engine)]

        # gRPC's server holds its last call, with objects of the previous term.
        await until(lambda: len(engines()) <= 2, "the release of earlier engines")

"""Ends whose records are not written yet: the delay has no visible effect."""

import pytest
import redis
from checking_worker import CheckingWorker
from scheduler_stack import Gateway, Received, Stack, prompt, running_stack
from waiting import until

from scheduler_svc.store.store import Store

ASKED = {"length": {"max_tokens": 4}, "several": {"max_tokens": 3, "n": 3}}


@pytest.fixture(autouse=True)
def delayed_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay every ending that the journal implies."""
    monkeypatch.setattr("scheduler_svc.engine.record_writer.END_BATCH_DELAY_S", 3600)


async def ended(stack: Stack, **overrides: object) -> tuple[Gateway, Received]:
    """Run a request whose end is not yet in Redis."""
    gateway = await stack.gateway()
    [received] = await gateway.wait_ended(
        await gateway.submit(prompt(9), request_id="r", **overrides)
    )
    await until(lambda: not stack.engine.live, "its end")
    assert stack.engine._record_writer.unwritten[-1].key.request_id == "r"
    return gateway, received


def outcome(received: Received) -> list[tuple[list[int], int, int, int]]:
    """The tokens and the end of each choice."""
    return [
        (choice.token_ids, choice.end.reason, choice.end.stop_token_id, choice.end.num_tokens)
        for choice in received.choices
    ]


@pytest.mark.parametrize("how", ASKED)
async def test_the_next_leader_finds_the_end_in_the_journal(redis_url, sockets, how):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        _, received = await ended(stack, **ASKED[how])
        await replays_it_after_a_takeover(stack, received, worker)


async def test_the_next_leader_finds_a_stop_token_in_the_journal(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        gateway = await stack.gateway()
        [whole] = await gateway.wait_ended(await gateway.submit(prompt(9), max_tokens=12))
        stop = whole.token_ids[5]
        _, received = await ended(stack, max_tokens=12, stop_token_ids=(stop,))
        assert received.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        await replays_it_after_a_takeover(stack, received, worker)


async def replays_it_after_a_takeover(
    stack: Stack, received: Received, worker: CheckingWorker
) -> None:
    num_sampled, previous = worker.num_sampled_tokens, stack.member
    successor = stack.start_scheduler()
    await until(lambda: successor.is_standby, "a standby")
    await previous.kill()
    stack.expire_lease(previous)
    gateway = await stack.gateway()
    [again] = await gateway.wait_ended(await gateway.attach(received))
    assert outcome(again) == outcome(received)
    assert worker.num_sampled_tokens == num_sampled


async def test_the_leader_keeps_the_end_when_redis_is_emptied(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        previous, received = await ended(stack, max_tokens=4)
        num_sampled = worker.num_sampled_tokens
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        await until(lambda: previous.lost is not None, "the end of the stream")
        gateway = await stack.gateway()
        [again] = await gateway.wait_ended(await gateway.attach(received))
        assert outcome(again) == outcome(received)
        assert worker.num_sampled_tokens == num_sampled


async def test_repeating_the_request_does_not_wait(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, received = await ended(stack, max_tokens=4)
        num_sampled = worker.num_sampled_tokens
        [again] = await gateway.wait_ended(await gateway.attach(received))
        assert outcome(again) == outcome(received)
        assert worker.num_sampled_tokens == num_sampled
        assert not stack.engine._record_writer.unwritten


async def test_other_requests_do_not_flush_it(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        gateway, _ = await ended(stack, max_tokens=4)
        await gateway.wait_ended(await gateway.submit(prompt(9), request_id="other"))
        await until(lambda: not stack.engine.live, "both ends")
        assert len(stack.engine._record_writer.unwritten) == 2


async def test_an_end_that_the_journal_does_not_imply_is_written_at_once(redis_url, sockets):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, _ = await ended(stack, max_tokens=4)
        cancelled = await gateway.submit(prompt(9), max_tokens=50, request_id="cancelled")
        await until(lambda: bool(gateway.received[cancelled].token_ids), "a token")
        await gateway.cancel(cancelled)
        await gateway.wait_ended()
        await until(lambda: not stack.engine._record_writer.unwritten, "the records")


async def test_a_drain_writes_it(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        await ended(stack, max_tokens=4)
        await stack.member.drain()
        store = Store.at(redis_url)
        assert await store.load_live() == []
        await store.close()
        stack.start_scheduler()

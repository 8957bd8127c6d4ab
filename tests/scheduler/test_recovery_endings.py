"""Ends that are not written yet: nobody notices that they wait for others."""

import pytest
import redis
from ledger_worker import LedgerWorker
from scheduler_stack import Gateway, Heard, Stack, prompt, running_stack
from waiting import until

from scheduler_svc.store.store import Store

ASKED = {"length": {"max_tokens": 4}, "several": {"max_tokens": 3, "n": 3}}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end is written for its own sake."""
    monkeypatch.setattr("scheduler_svc.core.recorder.GATHER_S", 3600)


async def ended(stack: Stack, **asked: object) -> tuple[Gateway, Heard]:
    """A request that is over, of whose end Redis does not know."""
    gateway = await stack.gateway()
    [heard] = await gateway.over(await gateway.submit(prompt(9), request_id="r", **asked))
    await until(lambda: not stack.engine.live, "its end")
    assert stack.engine._recorder.unwritten[-1].key.request_id == "r"
    return gateway, heard


def outcome(heard: Heard) -> list[tuple[list[int], int, int, int]]:
    """Of each choice: its tokens and how it ended."""
    return [
        (choice.token_ids, choice.end.reason, choice.end.stop_token_id, choice.end.num_tokens)
        for choice in heard.choices
    ]


@pytest.mark.parametrize("how", ASKED)
async def test_the_next_leader_finds_the_end_in_the_journal(redis_url, sockets, how):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        _, heard = await ended(stack, **ASKED[how])
        await says_it_again_after_a_takeover(stack, heard, worker)


async def test_the_next_leader_finds_a_stop_token_in_the_journal(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        gateway = await stack.gateway()
        [whole] = await gateway.over(await gateway.submit(prompt(9), max_tokens=12))
        stop = whole.token_ids[5]
        _, heard = await ended(stack, max_tokens=12, stop_token_ids=(stop,))
        assert heard.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        await says_it_again_after_a_takeover(stack, heard, worker)


async def says_it_again_after_a_takeover(stack: Stack, heard: Heard, worker: LedgerWorker) -> None:
    num_sampled, former = worker.num_sampled_tokens, stack.member
    successor = stack.start_scheduler()
    await until(lambda: successor.stands_by, "a standby")
    await former.kill()
    stack.lapse()
    gateway = await stack.gateway()
    [again] = await gateway.over(await gateway.attach(heard))
    assert outcome(again) == outcome(heard)
    assert worker.num_sampled_tokens == num_sampled


async def test_the_leader_carries_the_end_over_a_redis_that_was_emptied(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        former, heard = await ended(stack, max_tokens=4)
        num_sampled = worker.num_sampled_tokens
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        await until(lambda: former.lost is not None, "the end of the stream")
        gateway = await stack.gateway()
        [again] = await gateway.over(await gateway.attach(heard))
        assert outcome(again) == outcome(heard)
        assert worker.num_sampled_tokens == num_sampled


async def test_whoever_asks_for_it_does_not_wait(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, heard = await ended(stack, max_tokens=4)
        num_sampled = worker.num_sampled_tokens
        [again] = await gateway.over(await gateway.attach(heard))
        assert outcome(again) == outcome(heard)
        assert worker.num_sampled_tokens == num_sampled
        assert not stack.engine._recorder.unwritten


async def test_others_requests_do_not_have_it_written(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        gateway, _ = await ended(stack, max_tokens=4)
        await gateway.over(await gateway.submit(prompt(9), request_id="other"))
        await until(lambda: not stack.engine.live, "both ends")
        assert len(stack.engine._recorder.unwritten) == 2


async def test_what_the_journal_does_not_tell_is_written_at_once(redis_url, sockets):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway, _ = await ended(stack, max_tokens=4)
        cancelled = await gateway.submit(prompt(9), max_tokens=50, request_id="cancelled")
        await until(lambda: bool(gateway.heard[cancelled].token_ids), "a token")
        await gateway.cancel(cancelled)
        await gateway.over()
        await until(lambda: not stack.engine._recorder.unwritten, "the records")


async def test_a_drain_leaves_it_in_redis(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}) as stack:
        await ended(stack, max_tokens=4)
        await stack.member.drain()
        store = await Store.connect(redis_url)
        assert await store.load_live() == []
        await store.close()
        stack.start_scheduler()

"""Leaders that die, hand over, or wake up when another one leads."""

import asyncio

import pytest
from grpc import StatusCode
from ledger_worker import LedgerWorker
from scheduler_stack import Gateway, Heard, Member, Stack, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc.lanes.stream import WorkerStream
from scheduler_svc.store.errors import StaleEpoch
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Commit, CommitReply
from scheduler_svc.tenure import Tenure


async def running(stack: Stack, num_tokens: int = 3, **asked: object) -> tuple[Gateway, Heard]:
    """A request that has some of its tokens."""
    gateway = await stack.gateway()
    heard = gateway.heard[
        await gateway.submit(prompt(9), **{"max_tokens": 50, "num_logprobs": 2, **asked})
    ]
    await until(lambda: len(heard.token_ids) >= num_tokens, "some tokens")
    return gateway, heard


async def succeeded(stack: Stack, is_killed: bool) -> Gateway:
    """Another scheduler, which was there before, leads."""
    former, successor = stack.member, stack.start_scheduler()
    await until(lambda: successor.stands_by, "a standby")
    if is_killed:
        await former.kill()
        stack.lapse()
    else:
        await former.drain()
    return await stack.gateway()


def epochs_of(worker: LedgerWorker) -> list[int]:
    """Of its plans, each once."""
    return list(dict.fromkeys(plan.epoch for plan in worker.plans))


async def test_a_standby_turns_gateways_away_and_names_the_leader(redis_url, sockets):
    async with running_stack(
        redis_url, sockets, {"a": LedgerWorker(1)}, advertise="10.0.0.7:50052"
    ) as stack:
        await stack.gateway()
        standby = stack.start_scheduler()
        await until(lambda: standby.stands_by, "a standby")
        refused = await stack.connect()
        await until(lambda: refused.lost is not None, "the refusal")
        assert refused.lost.code() is StatusCode.UNAVAILABLE
        info = info_of(refused.lost)
        assert (info.reason, info.metadata["leader"]) == ("STANDBY", "10.0.0.7:50052")
        assert not stack.members[0].serving.done()


async def test_a_lead_that_was_given_up_is_taken_at_once_by_whoever_comes(redis_url, sockets):
    # Nobody would wait for so long a lease.
    async with running_stack(redis_url, sockets, {"a": LedgerWorker(1)}, lease_s=3600) as stack:
        _, heard = await running(stack)
        await stack.member.drain()
        stack.start_scheduler()
        gateway = await stack.gateway()
        [again] = await gateway.over(await gateway.submit_again(heard))
        assert again.is_whole


async def test_a_drain_does_not_wait_for_a_worker_that_is_not_there(
    redis_url, sockets, monkeypatch
):
    monkeypatch.setattr("scheduler_svc.lanes.stream.OPEN_TIMEOUT_S", 3600)
    async with running_stack(
        redis_url, sockets, {"a": LedgerWorker(1)}, names=("a", "gone"), drain_grace_s=3600
    ) as stack:
        await running(stack)
        await asyncio.wait_for(stack.member.drain(), 10)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drained"])
async def test_a_new_leader_goes_on_with_everything_and_finds_the_caches(
    redis_url, sockets, is_killed
):
    worker = LedgerWorker(1, num_blocks=128)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.over(await gateway.submit(prompt(40, 1), max_tokens=1))
        asked = [
            gateway.heard[await gateway.submit(prompt(29, tag), max_tokens=30, seed=tag, n=n)]
            for tag, n in ((2, 1), (3, 3), (4, 1))
        ]
        await until(lambda: all(min(h.next_indices) > 2 for h in asked), "some tokens of all")
        worker.gate.clear()
        await until(lambda: len(stack.only_lane._flights) == 2, "plans in flight")
        num_plans = len(worker.plans)
        asyncio.get_running_loop().call_later(0.2, worker.gate.set)
        gateway = await succeeded(stack, is_killed)
        worker.gate.set()
        for heard in asked:
            await gateway.submit_again(heard)
        late = await gateway.submit(prompt(40, 1), max_tokens=1, request_id="late")
        heard = await gateway.over()
        assert all(one.is_whole for one in heard)
        assert gateway.heard[late].end.num_cached_prompt_tokens == 36
        # Of each sequence no more than its last blocks, of those that were being filled.
        computed_again = [
            tokens - computed
            for plan in worker.plans[num_plans:]
            for tokens, computed in zip(
                plan.admissions.num_tokens, plan.admissions.num_computed_tokens, strict=True
            )
        ]
        assert len(computed_again) == 6
        assert max(computed_again) <= 2 * worker.hello.block_size
        stats = stack.engine.lanes[1].stats
        assert stats.num_preempted_by_recompute == 0
        # The late one, the last of the six, had not begun.
        num_lost = stats.num_recovered_tokens - stats.num_recovered_hit_tokens
        assert num_lost == sum(computed_again[:5])
        await worker.check()


async def six_running(stack: Stack) -> list[Heard]:
    """Requests that have some of their tokens."""
    gateway = await stack.gateway()
    asked = [
        gateway.heard[await gateway.submit(prompt(30, tag), max_tokens=30, seed=tag)]
        for tag in range(6)
    ]
    await until(lambda: all(min(h.next_indices) > 2 for h in asked), "some tokens of all")
    return asked


async def test_sequences_go_back_to_the_worker_that_comes_a_little_later(redis_url, sockets):
    workers = {"a": LedgerWorker(1), "b": LedgerWorker(2)}
    async with running_stack(redis_url, sockets, workers) as stack:
        asked = await six_running(stack)
        served = {name: set(worker.seeds.values()) for name, worker in workers.items()}
        assert all(served.values())
        for worker in workers.values():
            worker.gate.clear()
        workers["b"].awake.clear()
        workers["a"].gate.set()
        gateway = await succeeded(stack, is_killed=True)
        for heard in asked:
            await gateway.submit_again(heard)
        await until(lambda: 1 in stack.engine.lanes, "the first lane")
        workers["b"].gate.set()
        workers["b"].awake.set()
        assert all(one.is_whole for one in await gateway.over())
        for name, worker in workers.items():
            last = [plan for plan in worker.plans if plan.admissions.rows]
            assert {seed for plan in last for seed in plan.admissions.seeds} == served[name]
            await worker.check()


async def test_a_worker_that_is_busy_holds_up_nobody_else(redis_url, sockets, monkeypatch):
    monkeypatch.setattr("scheduler_svc.lanes.stream.OPEN_TIMEOUT_S", 3600)
    workers = {"a": LedgerWorker(1), "b": LedgerWorker(2)}
    async with running_stack(redis_url, sockets, workers, drain_grace_s=1) as stack:
        gateway = await stack.gateway()
        first = gateway.heard[await gateway.submit(prompt(30), max_tokens=30)]
        await until(lambda: len(first.token_ids) > 2, "some tokens")
        busy, free = sorted(workers.values(), key=lambda worker: not worker.rows)
        busy.gate.clear()
        gateway = await succeeded(stack, is_killed=True)
        await gateway.over(await gateway.submit(prompt(30, 1), request_id="other"))
        assert stack.engine.lanes.keys() == {free.hello.incarnation}
        busy.gate.set()
        [again] = await gateway.over(await gateway.submit_again(first))
        assert again.is_whole


async def test_a_worker_that_died_with_the_leader_is_not_waited_for_long(redis_url, sockets):
    workers = {"a": LedgerWorker(1), "b": LedgerWorker(2)}
    async with running_stack(redis_url, sockets, workers) as stack:
        asked = await six_running(stack)
        for worker in workers.values():
            worker.gate.clear()
        await stack.stop_worker("b")
        gateway = await succeeded(stack, is_killed=True)
        workers["a"].gate.set()
        for heard in asked:
            await gateway.submit_again(heard)
        assert all(one.is_whole for one in await gateway.over())


def hold_renewals(monkeypatch: pytest.MonkeyPatch, member: Member) -> asyncio.Event:
    """This scheduler's clock stands still, as far as its lease goes, until the event is set."""
    renew, tenure, go_on = Tenure._renew, member.scheduler._reign.tenure, asyncio.Event()

    async def renew_or_wait(asked: Tenure) -> None:
        if asked is tenure:
            await go_on.wait()
        await renew(asked)

    monkeypatch.setattr(Tenure, "_renew", renew_or_wait)
    return go_on


async def test_a_leader_wakes_up_after_the_takeover_with_a_frame_for_a_gateway_in_hand(
    redis_url, sockets, monkeypatch
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        old, asked = await running(stack)
        worker.gate.clear()
        await until(lambda: len(stack.only_lane._flights) == 2, "plans in flight")
        former = stack.member
        wakes_up = hold_renewals(monkeypatch, former)
        tenure = former.scheduler._reign.tenure
        await until(lambda: not tenure.is_held, "the end of what is certain")
        num_heard = len(asked.token_ids)
        [group] = former.engine.live.values()
        worker.gate.set()
        await until(
            lambda: group.sequences[0].num_journaled > num_heard, "tokens that are not sent"
        )
        successor = stack.start_scheduler(lease_s=3)
        await until(lambda: successor.stands_by, "a standby")
        stack.lapse()
        new = await stack.gateway()
        assert new.epoch > old.epoch
        [heard] = await new.over(await new.submit_again(asked))
        assert heard.is_whole
        wakes_up.set()
        await until(lambda: old.lost is not None, "the end of the old stream")
        assert info_of(old.lost).reason == "LEAD_ENDS"
        assert len(asked.token_ids) == num_heard
        assert epochs_of(worker) == [old.epoch, new.epoch]
        await until(lambda: former.stands_by, "a standby")
        await worker.check()


async def test_a_leader_wakes_up_after_the_takeover_with_a_plan_in_hand(
    redis_url, sockets, monkeypatch
):
    send, in_hand, sends = WorkerStream.send, asyncio.Event(), asyncio.Event()
    lost: list[Exception] = []
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        old, asked = await running(stack)
        former = stack.member

        async def hold_old(stream: WorkerStream, plan: worker_pb2.BatchPlan) -> None:
            if plan.epoch == old.epoch:
                in_hand.set()
                await sends.wait()
            try:
                await send(stream, plan)
            except Exception as error:
                lost.append(error)
                raise

        monkeypatch.setattr(WorkerStream, "send", hold_old)
        await until(in_hand.is_set, "a plan in hand")
        num_old_plans = len(worker.plans)
        wakes_up = hold_renewals(monkeypatch, former)
        successor = stack.start_scheduler(lease_s=3)
        await until(lambda: successor.stands_by, "a standby")
        stack.lapse()
        new = await stack.gateway()
        again = await new.submit_again(asked)
        await until(lambda: len(new.heard[again].token_ids) > len(asked.token_ids), "a token")
        sends.set()
        [heard] = await new.over(again)
        assert heard.is_whole
        wakes_up.set()
        await until(lambda: former.stands_by, "a standby")
        assert len(lost) <= 1
        epochs = [plan.epoch for plan in worker.plans]
        assert epochs[num_old_plans + 1 :] == [new.epoch] * len(epochs[num_old_plans + 1 :])
        assert epochs == sorted(epochs)
        await worker.check()


async def test_a_commit_lands_after_the_pool_was_opened_again(redis_url, sockets, monkeypatch):
    commit_to, in_hand, lands = Pool.commit, asyncio.Event(), asyncio.Event()
    refused: list[StaleEpoch] = []
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        old, asked = await running(stack)
        former = stack.member

        async def hold_old(pool: Pool, commit: Commit) -> CommitReply:
            if pool._leadership.epoch == old.epoch:
                in_hand.set()
                await lands.wait()
            try:
                return await commit_to(pool, commit)
            except StaleEpoch as error:
                refused.append(error)
                raise

        monkeypatch.setattr(Pool, "commit", hold_old)
        await until(in_hand.is_set, "a commit on its way")
        wakes_up = hold_renewals(monkeypatch, former)
        successor = stack.start_scheduler(lease_s=3)
        await until(lambda: successor.stands_by, "a standby")
        stack.lapse()
        new = await stack.gateway()
        again = await new.submit_again(asked)
        await until(lambda: len(new.heard[again].token_ids) > len(asked.token_ids), "a token")
        lands.set()
        await until(lambda: bool(refused), "the refusal")
        [heard] = await new.over(again)
        assert heard.is_whole
        wakes_up.set()
        await until(lambda: former.stands_by, "a standby")
        await stack.only_lane.check_integrity()
        await worker.check()

"""Leaders that die, hand over, or resume when another one leads."""

import asyncio
from dataclasses import replace

import pytest
from checking_worker import CheckingWorker
from grpc import StatusCode
from scheduler_stack import (
    Gateway,
    Member,
    Received,
    Stack,
    info_of,
    num_in_flight,
    prompt,
    running_stack,
)
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc import shard as shard_module
from scheduler_svc.gateway.frame_handler import FrameHandler
from scheduler_svc.lane.worker_stream import WorkerStream
from scheduler_svc.leadership.lease import Lease
from scheduler_svc.shard import Shard
from scheduler_svc.store.errors import StaleEpoch
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store
from scheduler_svc.store.types import Commit, CommitReply
from scheduler_svc.term import Term

KEYS = ShardKeys(0)


async def running(
    stack: Stack, num_tokens: int = 3, **overrides: object
) -> tuple[Gateway, Received]:
    """Start a request and wait for some of its tokens."""
    gateway = await stack.gateway()
    received = gateway.received[
        await gateway.submit(prompt(9), **{"max_tokens": 50, "num_logprobs": 2, **overrides})
    ]
    await until(lambda: len(received.token_ids) >= num_tokens, "some tokens")
    return gateway, received


async def succeeded(stack: Stack, is_killed: bool) -> Gateway:
    """Let a standby take over."""
    previous, successor = stack.member, stack.start_scheduler()
    await until(lambda: successor.is_standby, "a standby")
    if is_killed:
        await previous.kill()
        stack.expire_lease(previous)
    else:
        await previous.drain()
    return await stack.gateway()


def epochs_of(worker: CheckingWorker) -> list[int]:
    """The distinct epochs of its plans, in order."""
    return list(dict.fromkeys(plan.epoch for plan in worker.plans))


async def test_a_standby_refuses_gateways_and_names_the_leader(redis_url, sockets):
    async with running_stack(
        redis_url, sockets, {"a": CheckingWorker(1)}, advertise="10.0.0.7:50052"
    ) as stack:
        await stack.gateway()
        standby = stack.start_scheduler()
        await until(lambda: standby.is_standby, "a standby")
        refused = await stack.connect()
        await until(lambda: refused.lost is not None, "the refusal")
        assert refused.lost.code() is StatusCode.UNAVAILABLE
        info = info_of(refused.lost)
        assert (info.reason, info.metadata["leader"]) == ("STANDBY", "10.0.0.7:50052")
        assert not stack.members[0].serving.done()


async def test_a_gateway_waits_for_a_scheduler_that_is_about_to_lead(
    redis_url, sockets, monkeypatch
):
    """It is not refused while the requests are recovered, unless that takes long."""
    recover, is_recovering, is_due = shard_module.recover, asyncio.Event(), asyncio.Event()
    handler_soon, is_asked = Shard.handler_soon, asyncio.Event()

    async def recover_late(store: Store) -> object:
        is_recovering.set()
        await is_due.wait()
        return await recover(store)

    async def notice(shard: Shard) -> FrameHandler | None:
        is_asked.set()
        return await handler_soon(shard)

    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
        await stack.gateway()
        monkeypatch.setattr(shard_module, "recover", recover_late)
        previous = stack.member
        stack.start_scheduler()
        await until(lambda: stack.member.is_standby, "a standby")
        await previous.drain()
        await is_recovering.wait()
        membership = stack.scheduler._process.membership
        await until(lambda: membership.is_owner(0), "the owner")
        monkeypatch.setattr(shard_module, "HANDLER_WITHIN_S", 0.001)
        refused = await stack.connect()
        await until(lambda: refused.lost is not None, "the refusal")
        assert info_of(refused.lost).reason == "STANDBY"
        monkeypatch.setattr(shard_module, "HANDLER_WITHIN_S", 3600)
        monkeypatch.setattr(Shard, "handler_soon", notice)
        gateway = await stack.connect()
        await asyncio.wait_for(is_asked.wait(), 10)
        is_due.set()
        await until(lambda: gateway.hello is not None, "the hello")
        await gateway.wait_ended(await gateway.submit(prompt(9)))


async def test_a_released_lease_is_acquired_at_once_by_the_next_scheduler(redis_url, sockets):
    # The lease is too long for the test to wait for.
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}, lease_s=3600) as stack:
        _, received = await running(stack)
        await stack.member.drain()
        stack.start_scheduler()
        gateway = await stack.gateway()
        [again] = await gateway.wait_ended(await gateway.submit_again(received))
        assert again.is_whole


async def test_a_standby_replaces_an_ended_leader_before_its_lease_expires(redis_url, sockets):
    async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}, lease_s=3600) as stack:
        _, received = await running(stack)
        leader, standby = stack.member, stack.start_scheduler()
        await until(lambda: standby.is_standby and standby.watches_leader, "a standby that watches")
        await leader.kill()
        gateway = await stack.gateway()
        [again] = await gateway.wait_ended(await gateway.submit_again(received))
        assert again.is_whole


async def test_a_defect_that_ends_a_term_during_its_drain_is_raised(
    redis_url, sockets, monkeypatch
):
    run = Term.run

    async def fail(term: Term) -> None:
        await run(term)
        raise RuntimeError("a defect")

    monkeypatch.setattr(Term, "run", fail)
    with pytest.raises(ExceptionGroup) as caught:
        async with running_stack(redis_url, sockets, {"a": CheckingWorker(1)}) as stack:
            await stack.gateway()
    assert [str(error) for error in shard_module.leaves(caught.value)] == ["a defect"]


async def test_a_drain_does_not_wait_for_an_absent_worker(redis_url, sockets, monkeypatch):
    monkeypatch.setattr("scheduler_svc.lane.worker_stream.OPEN_TIMEOUT_S", 3600)
    async with running_stack(
        redis_url, sockets, {"a": CheckingWorker(1)}, names=("a", "gone"), drain_grace_s=3600
    ) as stack:
        await running(stack)
        await asyncio.wait_for(stack.member.drain(), 10)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "drained"])
async def test_a_new_leader_continues_everything_and_hits_the_caches(redis_url, sockets, is_killed):
    worker = CheckingWorker(1, num_blocks=128)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.wait_ended(await gateway.submit(prompt(40, 1), max_tokens=1))
        original = [
            gateway.received[await gateway.submit(prompt(29, tag), max_tokens=30, seed=tag, n=n)]
            for tag, n in ((2, 1), (3, 3), (4, 1))
        ]
        await until(lambda: all(min(h.next_indices) > 2 for h in original), "some tokens of all")
        worker.gate.clear()
        await until(lambda: num_in_flight(stack.only_lane) == 2, "plans in flight")
        num_plans = len(worker.plans)
        asyncio.get_running_loop().call_later(0.2, worker.gate.set)
        gateway = await succeeded(stack, is_killed)
        worker.gate.set()
        for received in original:
            await gateway.submit_again(received)
        late = await gateway.submit(prompt(40, 1), max_tokens=1, request_id="late")
        received = await gateway.wait_ended()
        assert all(one.is_whole for one in received)
        assert gateway.received[late].end.num_cached_prompt_tokens == 36
        # Only the last blocks of each sequence, which were being filled.
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
        # The late one, the last of the six, had not started.
        num_lost = stats.num_recovered_tokens - stats.num_recovered_hit_tokens
        assert num_lost == sum(computed_again[:5])
        await worker.check()


async def second_choice_running(stack: Stack, worker: CheckingWorker) -> Received:
    """Run two choices one after the other, and hold the worker back in the second one."""
    worker.hold_after = 75
    gateway = await stack.gateway()
    received = gateway.received[await gateway.submit(prompt(9), max_tokens=50, seed=3, n=2)]
    await until(lambda: len(received.choices[1].token_ids) > 20, "tokens of the second choice")
    # Else it would be held back after the gate is opened again.
    await until(lambda: worker.is_held_back, "the worker, held back")
    assert received.choices[0].end is not None
    assert received.choices[1].end is None
    return received


async def test_a_choice_that_ended_is_recorded_before_its_tokens_leave_the_journal(
    redis_url, redis_client, sockets, monkeypatch
):
    """The stream of the new leader would fail on a token that is sent twice."""
    monkeypatch.setattr("scheduler_svc.lane.journal_compaction.COMPACT_EVERY_STEPS", 8)
    worker = CheckingWorker(1, max_num_seqs=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        received = await second_choice_running(stack, worker)
        # More tokens than that are the first choice's.
        await until(lambda: redis_client.xlen(KEYS.pool(1).journal) < 30, "the journal's trim")
        gateway = await succeeded(stack, is_killed=True)
        worker.gate.set()
        [again] = await gateway.wait_ended(await gateway.submit_again(received))
        assert again.is_whole


async def test_a_choice_that_ended_is_recorded_before_its_pool_is_dropped(
    redis_url, redis_client, sockets
):
    worker, other = CheckingWorker(1, max_num_seqs=1), CheckingWorker(2, max_num_seqs=1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        received = await second_choice_running(stack, worker)
        other.gate.clear()
        await stack.stop_worker("a")
        await stack.start_worker("a", other)
        await until(lambda: not redis_client.exists(KEYS.pool(1).journal), "the pool's end")
        gateway = await succeeded(stack, is_killed=True)
        other.gate.set()
        [again] = await gateway.wait_ended(await gateway.submit_again(received))
        assert again.is_whole


async def six_running(stack: Stack) -> list[Received]:
    """Start six requests and wait for some tokens of each."""
    gateway = await stack.gateway()
    original = [
        gateway.received[await gateway.submit(prompt(30, tag), max_tokens=30, seed=tag)]
        for tag in range(6)
    ]
    await until(lambda: all(min(h.next_indices) > 2 for h in original), "some tokens of all")
    return original


async def test_sequences_return_to_their_worker_that_joins_a_little_later(redis_url, sockets):
    workers = {"a": CheckingWorker(1), "b": CheckingWorker(2)}
    async with running_stack(redis_url, sockets, workers) as stack:
        original = await six_running(stack)
        served = {name: set(worker.seeds.values()) for name, worker in workers.items()}
        assert all(served.values())
        for worker in workers.values():
            worker.gate.clear()
        workers["b"].awake.clear()
        workers["a"].gate.set()
        gateway = await succeeded(stack, is_killed=True)
        for received in original:
            await gateway.submit_again(received)
        await until(lambda: 1 in stack.engine.lanes, "the first lane")
        workers["b"].gate.set()
        workers["b"].awake.set()
        assert all(one.is_whole for one in await gateway.wait_ended())
        for name, worker in workers.items():
            last = [plan for plan in worker.plans if plan.admissions.rows]
            assert {seed for plan in last for seed in plan.admissions.seeds} == served[name]
            await worker.check()


async def test_a_busy_worker_does_not_delay_other_workers(redis_url, sockets, monkeypatch):
    monkeypatch.setattr("scheduler_svc.lane.worker_stream.OPEN_TIMEOUT_S", 3600)
    workers = {"a": CheckingWorker(1), "b": CheckingWorker(2)}
    async with running_stack(redis_url, sockets, workers, drain_grace_s=1) as stack:
        gateway = await stack.gateway()
        first = gateway.received[await gateway.submit(prompt(30), max_tokens=30)]
        await until(lambda: len(first.token_ids) > 2, "some tokens")
        busy, free = sorted(workers.values(), key=lambda worker: not worker.rows)
        busy.gate.clear()
        gateway = await succeeded(stack, is_killed=True)
        await gateway.wait_ended(await gateway.submit(prompt(30, 1), request_id="other"))
        assert stack.engine.lanes.keys() == {free.hello.incarnation}
        busy.gate.set()
        [again] = await gateway.wait_ended(await gateway.submit_again(first))
        assert again.is_whole


async def test_the_wait_for_a_worker_that_died_with_the_leader_is_short(redis_url, sockets):
    workers = {"a": CheckingWorker(1), "b": CheckingWorker(2)}
    async with running_stack(redis_url, sockets, workers) as stack:
        original = await six_running(stack)
        for worker in workers.values():
            worker.gate.clear()
        await stack.stop_worker("b")
        gateway = await succeeded(stack, is_killed=True)
        workers["a"].gate.set()
        for received in original:
            await gateway.submit_again(received)
        assert all(one.is_whole for one in await gateway.wait_ended())


def hold_periodic_writes(monkeypatch: pytest.MonkeyPatch, member: Member) -> asyncio.Event:
    """Suspend what this scheduler writes at intervals, so that it does not notice its successor
    before the event is set: renewals, and the map with its successor as a member."""
    renew, lease, go_on = Lease._renew, member.term.lease, asyncio.Event()
    write_map, epoch = Store.write_map, member.term.epoch

    async def renew_or_wait(renewed: Lease) -> None:
        if renewed is lease:
            await go_on.wait()
        await renew(renewed)

    async def write_map_or_wait(store: Store, packed: bytes) -> int:
        if store.leadership.epoch == epoch:
            await go_on.wait()
        return await write_map(store, packed)

    monkeypatch.setattr(Lease, "_renew", renew_or_wait)
    monkeypatch.setattr(Store, "write_map", write_map_or_wait)
    return go_on


async def test_a_leader_resumes_after_the_takeover_with_an_unsent_frame(
    redis_url, sockets, monkeypatch
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        old, original = await running(stack)
        worker.gate.clear()
        await until(lambda: num_in_flight(stack.only_lane) == 2, "plans in flight")
        previous = stack.member
        wakes_up = hold_periodic_writes(monkeypatch, previous)
        lease = previous.term.lease
        await until(lambda: not lease.is_held, "the end of the safe time")
        num_received = len(original.token_ids)
        [group] = previous.engine.live.values()
        worker.gate.set()
        await until(
            lambda: group.sequences[0].num_journaled > num_received, "tokens that are not sent"
        )
        successor = stack.start_scheduler(lease_s=3)
        await until(lambda: successor.is_standby, "a standby")
        stack.expire_lease()
        new = await stack.gateway()
        assert new.epoch > old.epoch
        [received] = await new.wait_ended(await new.submit_again(original))
        assert received.is_whole
        wakes_up.set()
        await until(lambda: old.lost is not None, "the end of the old stream")
        assert info_of(old.lost).reason == "LEAD_ENDS"
        assert len(original.token_ids) == num_received
        assert epochs_of(worker) == [old.epoch, new.epoch]
        await until(lambda: previous.is_standby, "a standby")
        await worker.check()


async def test_a_leader_resumes_after_the_takeover_with_an_unsent_plan(
    redis_url, sockets, monkeypatch
):
    send, in_hand, sends = WorkerStream.send, asyncio.Event(), asyncio.Event()
    lost: list[Exception] = []
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        _, original = await running(stack)
        previous = stack.member

        loop = stack.only_lane._loop
        hooks = loop._hooks

        async def hold_old() -> None:
            await hooks.wait_for_lease()
            in_hand.set()
            await sends.wait()

        def noted_send(stream: WorkerStream, request: worker_pb2.ExecuteRequest) -> None:
            try:
                send(stream, request)
            except Exception as error:
                lost.append(error)
                raise

        monkeypatch.setattr(WorkerStream, "send", noted_send)
        loop._hooks = replace(hooks, wait_for_lease=hold_old)
        await until(in_hand.is_set, "a plan in hand")
        num_old_plans = len(worker.plans)
        wakes_up = hold_periodic_writes(monkeypatch, previous)
        successor = stack.start_scheduler(lease_s=3)
        await until(lambda: successor.is_standby, "a standby")
        stack.expire_lease()
        new = await stack.gateway()
        again = await new.submit_again(original)
        await until(lambda: len(new.received[again].token_ids) > len(original.token_ids), "a token")
        sends.set()
        [received] = await new.wait_ended(again)
        assert received.is_whole
        wakes_up.set()
        await until(lambda: previous.is_standby, "a standby")
        assert len(lost) <= 1
        epochs = [plan.epoch for plan in worker.plans]
        assert epochs[num_old_plans + 1 :] == [new.epoch] * len(epochs[num_old_plans + 1 :])
        assert epochs == sorted(epochs)
        await worker.check()


async def test_a_commit_arrives_after_the_pool_was_reopened(redis_url, sockets, monkeypatch):
    commit_to, in_hand, arrives = Pool.commit, asyncio.Event(), asyncio.Event()
    refused: list[StaleEpoch] = []
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, lease_s=0.6) as stack:
        old, original = await running(stack)
        previous = stack.member

        async def hold_old(pool: Pool, commit: Commit) -> CommitReply:
            if pool._leadership.epoch == old.epoch:
                in_hand.set()
                await arrives.wait()
            try:
                return await commit_to(pool, commit)
            except StaleEpoch as error:
                refused.append(error)
                raise

        monkeypatch.setattr(Pool, "commit", hold_old)
        await until(in_hand.is_set, "a commit on its way")
        wakes_up = hold_periodic_writes(monkeypatch, previous)
        successor = stack.start_scheduler(lease_s=3)
        await until(lambda: successor.is_standby, "a standby")
        stack.expire_lease()
        new = await stack.gateway()
        again = await new.submit_again(original)
        await until(lambda: len(new.received[again].token_ids) > len(original.token_ids), "a token")
        arrives.set()
        await until(lambda: bool(refused), "the refusal")
        [received] = await new.wait_ended(again)
        assert received.is_whole
        wakes_up.set()
        await until(lambda: previous.is_standby, "a standby")
        await stack.only_lane.check_integrity()
        await worker.check()

"""Workers that die, hang, sleep, lie or leave, and calls that cross with it."""

import asyncio

import ledger_worker
import pytest
from ledger_worker import Broken, LedgerWorker
from scheduler_stack import INTERNAL, Stack, info_of, prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes import watch
from scheduler_svc.lanes.leaving import Leaving
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Commit, CommitReply


async def all_are_whole(stack: Stack, *workers: LedgerWorker) -> None:
    """Of every gateway; and nothing is left."""
    for gateway in stack.gateways:
        assert all(heard.is_whole for heard in await gateway.over())
    await until(lambda: not stack.engine.live, "the end of all")
    await until(lambda: all(lane.is_empty for lane in stack.engine.lanes.values()), "empty lanes")
    for lane in stack.engine.lanes.values():
        assert lane.num_free_blocks == lane.worker.num_blocks - 1
        await lane.check_integrity()
    for worker in workers:
        await worker.check()


async def test_a_commit_is_repeated_when_its_reply_is_lost(redis_url, sockets, monkeypatch):
    replies: dict[int, list[CommitReply]] = {}
    commit_to = Pool.commit

    async def lose_first(pool: Pool, commit: Commit) -> CommitReply:
        reply = await commit_to(pool, commit)
        heard = replies.setdefault(commit.step, [])
        heard.append(reply)
        # Admissions, appends, decodes and releases: all kinds of steps.
        if len(heard) == 1 and commit.step < 8:
            raise StoreUnavailable("the reply is lost")
        return reply

    monkeypatch.setattr("scheduler_svc.lanes.patience.RETRY_S", 0.01)
    monkeypatch.setattr(Pool, "commit", lose_first)
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(3):
            await gateway.submit(prompt(9, seed), max_tokens=6, seed=seed, n=2)
        await all_are_whole(stack, worker)
        assert worker.num_streams == 1
        assert worker.num_sampled_tokens == 3 * 2 * 6
    twice = [heard for heard in replies.values() if len(heard) > 1]
    assert len(twice) >= 4
    assert all(first == second for first, second in twice)


@pytest.mark.parametrize("num_heard", [0, 1])
async def test_a_stream_breaks_with_one_plan_executed_and_one_not(redis_url, sockets, num_heard):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(3):
            await gateway.submit(prompt(9, seed), max_tokens=30, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.heard.values()), "tokens")
        worker.gate.clear()
        await until(lambda: len(stack.only_lane._flights) == 2, "two plans in flight")
        lost_step = worker.runner.last_finished_step + 1 + num_heard
        num_left = [num_heard]

        def lose(result: worker_pb2.StepResult) -> None:
            num_left[0] -= 1
            if num_left[0] < 0:
                worker.distort = lambda result: None
                raise Broken

        worker.distort = lose
        worker.gate.set()
        await all_are_whole(stack, worker)
        assert worker.num_streams == 2
        # It was run, and nothing of the plans behind it.
        assert worker.hello.last_finished_step == lost_step


async def test_a_late_token_of_a_preempted_sequence_and_then_the_lane_is_lost(
    redis_url, sockets, monkeypatch
):
    preempt, late = Leaving.preempt, []
    # Two sequences of 32 tokens want 16 blocks.
    worker = LedgerWorker(1, num_blocks=14, max_model_len=32)

    def preempt_and_note(leaving: Leaving, sequence: Sequence) -> None:
        if sequence.last_step > leaving._roster.landed_step:
            late.append(sequence)
        preempt(leaving, sequence)

    async def step_slowly() -> None:
        """So that the scheduler has as many plans in flight as it may."""
        worker.distort = lambda result: worker.gate.clear()
        while not late:
            worker.gate.set()
            await asyncio.sleep(0.01)
        worker.gate.clear()

    monkeypatch.setattr(Leaving, "preempt", preempt_and_note)
    async with running_stack(
        redis_url, sockets, {"a": worker}, pipeline_depth=3, preemption_mode="recompute"
    ) as stack:
        gateway = await stack.gateway()
        for seed in range(2):
            await gateway.submit(prompt(8, seed), max_tokens=24, seed=seed)
        await step_slowly()
        sequence, num_known = late[0], late[0].num_output_tokens

        def break_once_it_has_come(result: worker_pb2.StepResult) -> None:
            if sequence.num_output_tokens > num_known:
                worker.distort = lambda result: None
                raise Broken

        assert sequence.row is None
        worker.distort = break_once_it_has_come
        worker.gate.set()
        await until(lambda: worker.num_streams == 2, "the lane's reopening")
        await all_are_whole(stack, worker)


@pytest.mark.parametrize("is_reopened", [False, True])
async def test_a_hit_block_is_taken_between_match_and_commit(
    redis_url, sockets, monkeypatch, is_reopened
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.over(await gateway.submit(prompt(21), max_tokens=1))
        match, hits = Pool.match, []

        async def match_and_take(pool: Pool, queries: list) -> list:
            found = await match(pool, queries)
            if not hits:
                hits.extend(found)
                await pool.reset_prefix_cache()
                if is_reopened:
                    worker._stream.end()
            return found

        monkeypatch.setattr(Pool, "match", match_and_take)
        [heard] = await gateway.over(await gateway.submit(prompt(21), max_tokens=9, seed=4))
        assert [hit.num_hits for hit in hits] == [5]
        assert heard.end.num_cached_prompt_tokens == 0
        await all_are_whole(stack, worker)
        assert worker.num_streams == 1 + is_reopened


async def test_a_draining_worker_gives_its_rows_to_another_one(redis_url, sockets):
    workers = {name: LedgerWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(6):
            await gateway.submit(prompt(9, seed), max_tokens=40, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.heard.values()), "tokens")
        # Whoever is slow now must not hold up the drain.
        for worker in workers.values():
            worker.gate.clear()
        num_plans = len(workers["b"].plans)
        workers["a"].drain()
        for worker in workers.values():
            worker.gate.set()
        await until(lambda: stack.engine.lanes.keys() == {2}, "the end of the drained lane")
        assert not gateway.heard[1].over or not gateway.heard[2].over
        await all_are_whole(stack, workers["b"])
        await workers["a"].check()
        admitted = [len(p.admissions.rows) for p in workers["b"].plans[num_plans:]]
        assert sum(admitted) > 0


async def test_a_draining_worker_runs_on_where_there_is_no_other_and_takes_nobody(
    redis_url, sockets
):
    worker = LedgerWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, names=("a", "b")) as stack:
        gateway = await stack.gateway()
        running = await gateway.submit(prompt(9), max_tokens=30)
        await until(lambda: len(gateway.heard[running].token_ids) > 2, "tokens")
        worker.gate.clear()
        worker.drain()
        await until(lambda: stack.only_lane.draining, "the drain")
        late = await gateway.submit(prompt(9, 2), max_tokens=5, seed=2)
        await until(lambda: gateway.heard[late].accepted, "acceptance")
        worker.gate.set()
        await gateway.over(running)
        await until(lambda: 1 not in stack.engine.lanes, "the end of the drained lane")
        assert not gateway.heard[late].token_ids
        other = LedgerWorker(2)
        await stack.start_worker("b", other)
        await gateway.over(late)
        for one in (worker, other):
            await one.check()
        assert all(heard.is_whole for heard in gateway.heard.values())
        assert sum(len(plan.admissions.rows) for plan in worker.plans) == 1


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_a_poisonous_request_is_failed_alone_and_its_neighbours_finish(
    redis_url, sockets, monkeypatch, names
):
    monkeypatch.setattr("scheduler_svc.lanes.discovery.RETRY_S", 0.05)
    workers = {name: LedgerWorker(index + 1) for index, name in enumerate(names)}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        for worker in workers.values():
            worker.poison.add(13)
        good = [
            await gateway.submit(prompt(9, seed), max_tokens=10, seed=seed) for seed in range(6)
        ]
        bad = await gateway.submit(prompt(9, 13), max_tokens=10, seed=13)
        good += [
            await gateway.submit(prompt(9, seed), max_tokens=10, seed=seed) for seed in range(6, 9)
        ]
        [failed] = await gateway.over(bad)
        assert (failed.failure.code, info_of(failed.failure).reason) == (INTERNAL, "POISON")
        assert all(heard.is_whole for heard in await gateway.over(*good))
        # Once beside others, once alone.
        num_lost = sum(worker.num_streams for worker in workers.values()) - len(workers)
        await until(lambda: len(stack.engine.lanes) == len(workers), "all lanes")
        assert num_lost <= 2
        for worker in workers.values():
            await worker.check()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is short."""
    monkeypatch.setattr(ledger_worker, "BEAT_S", 0.05)
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    monkeypatch.setattr(watch, "SILENCE_S", 0.5)
    monkeypatch.setattr("scheduler_svc.lanes.stream.OPEN_TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("hasty")
async def test_a_worker_that_is_stopped_is_noticed_and_ignored_when_it_wakes_up(redis_url, sockets):
    workers = {name: LedgerWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(4):
            await gateway.submit(prompt(9, seed), max_tokens=40, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.heard.values()), "tokens")
        sleeper = workers["a"]
        assert sleeper.rows
        sleeper.awake.clear()
        num_sampled = sleeper.num_sampled_tokens
        assert all(heard.is_whole for heard in await gateway.over())
        assert stack.engine.lanes.keys() == {2}
        # What it had in hand is run, and nobody hears of it.
        sleeper.awake.set()
        await until(lambda: len(stack.engine.lanes) == 2, "its return")
        assert sleeper.num_sampled_tokens > num_sampled
        for seed in range(4, 12):
            await gateway.submit(prompt(9, seed), max_tokens=10, seed=seed)
        await all_are_whole(stack, *workers.values())


async def test_a_worker_that_beats_and_does_not_finish_its_step_is_lost(redis_url, sockets):
    workers = {name: LedgerWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers, step_timeout_s=0.5) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(4):
            await gateway.submit(prompt(9, seed), max_tokens=40, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.heard.values()), "tokens")
        workers["a"].gate.clear()
        assert all(heard.is_whole for heard in await gateway.over())
        assert stack.engine.lanes.keys() == {2}
        workers["a"].gate.set()
        await until(lambda: len(stack.engine.lanes) == 2, "its return")
        await all_are_whole(stack, *workers.values())

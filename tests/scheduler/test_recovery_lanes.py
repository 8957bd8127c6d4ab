"""Workers that die, hang, stop, drain or fail, and calls that overlap with it."""

import asyncio
import time
from dataclasses import replace

import checking_worker
import pytest
from checking_worker import Broken, CheckingWorker
from scheduler_stack import INTERNAL, Stack, info_of, num_in_flight, prompt, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.crashes import MAX_CONCLUSIVE
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane import worker_stream
from scheduler_svc.lane.steps.release import StepRelease
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Commit, CommitReply


async def all_are_whole(stack: Stack, *workers: CheckingWorker) -> None:
    """Wait until every gateway has all its tokens and no resource is held."""
    for gateway in stack.gateways:
        assert all(received.is_whole for received in await gateway.wait_ended())
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
        received = replies.setdefault(commit.step, [])
        received.append(reply)
        # Admissions, appends, decodes and releases: all kinds of steps.
        if len(received) == 1 and commit.step < 8:
            raise StoreUnavailable("the reply is lost")
        return reply

    monkeypatch.setattr("scheduler_svc.store.retry.RETRY_S", 0.01)
    monkeypatch.setattr(Pool, "commit", lose_first)
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(3):
            await gateway.submit(prompt(9, seed), max_tokens=6, seed=seed, n=2)
        await all_are_whole(stack, worker)
        assert worker.num_streams == 1
        assert worker.num_sampled_tokens == 3 * 2 * 6
    twice = [received for received in replies.values() if len(received) > 1]
    assert len(twice) >= 4
    assert all(first == second for first, second in twice)


@pytest.mark.parametrize("num_received", [0, 1])
async def test_a_stream_breaks_with_one_plan_executed_and_one_not(redis_url, sockets, num_received):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        for seed in range(3):
            await gateway.submit(prompt(9, seed), max_tokens=30, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.received.values()), "tokens")
        worker.gate.clear()
        await until(lambda: num_in_flight(stack.only_lane) == 2, "two plans in flight")
        lost_step = worker.runner.last_finished_step + 1 + num_received
        num_left = [num_received]

        def lose(result: worker_pb2.StepResult) -> None:
            num_left[0] -= 1
            if num_left[0] < 0:
                worker.distort = lambda result: None
                raise Broken

        worker.distort = lose
        worker.gate.set()
        await all_are_whole(stack, worker)
        assert worker.num_streams == 2
        # It was run, and no later plan.
        assert worker.hello.last_finished_step == lost_step


async def test_a_late_token_of_a_preempted_sequence_and_then_the_lane_is_lost(
    redis_url, sockets, monkeypatch
):
    preempt, late = StepRelease.preempt, []
    # Two sequences of 32 tokens need 16 blocks.
    worker = CheckingWorker(1, num_blocks=14, max_model_len=32)

    def preempt_and_note(release: StepRelease, sequence: Sequence) -> None:
        if sequence.last_step > release._table.completed_step:
            late.append(sequence)
        preempt(release, sequence)

    async def step_slowly() -> None:
        """Keep as many plans in flight as allowed."""
        worker.distort = lambda result: worker.gate.clear()
        while not late:
            worker.gate.set()
            await asyncio.sleep(0.01)
        worker.gate.clear()

    monkeypatch.setattr(StepRelease, "preempt", preempt_and_note)
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
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await gateway.wait_ended(await gateway.submit(prompt(21), max_tokens=1))
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
        [received] = await gateway.wait_ended(
            await gateway.submit(prompt(21), max_tokens=9, seed=4)
        )
        assert [hit.num_hits for hit in hits] == [5]
        assert received.end.num_cached_prompt_tokens == 0
        await all_are_whole(stack, worker)
        assert worker.num_streams == 1 + is_reopened


async def test_a_draining_workers_sequences_move_to_another_one(redis_url, sockets):
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(6):
            await gateway.submit(prompt(9, seed), max_tokens=40, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.received.values()), "tokens")
        # A slow worker must not delay the drain.
        for worker in workers.values():
            worker.gate.clear()
        num_plans = len(workers["b"].plans)
        workers["a"].drain()
        for worker in workers.values():
            worker.gate.set()
        await until(lambda: stack.engine.lanes.keys() == {2}, "the end of the drained lane")
        assert not gateway.received[1].is_ended or not gateway.received[2].is_ended
        await all_are_whole(stack, workers["b"])
        await workers["a"].check()
        admitted = [len(p.admissions.rows) for p in workers["b"].plans[num_plans:]]
        assert sum(admitted) > 0


async def test_a_draining_worker_without_another_one_runs_on_and_takes_no_requests(
    redis_url, sockets
):
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}, names=("a", "b")) as stack:
        gateway = await stack.gateway()
        running = await gateway.submit(prompt(9), max_tokens=30)
        await until(lambda: len(gateway.received[running].token_ids) > 2, "tokens")
        worker.gate.clear()
        worker.drain()
        await until(lambda: stack.only_lane.draining, "the drain")
        late = await gateway.submit(prompt(9, 2), max_tokens=5, seed=2)
        await until(lambda: gateway.received[late].accepted, "acceptance")
        worker.gate.set()
        await gateway.wait_ended(running)
        await until(lambda: 1 not in stack.engine.lanes, "the end of the drained lane")
        assert not gateway.received[late].token_ids
        other = CheckingWorker(2)
        await stack.start_worker("b", other)
        await gateway.wait_ended(late)
        for one in (worker, other):
            await one.check()
        assert all(received.is_whole for received in gateway.received.values())
        assert sum(len(plan.admissions.rows) for plan in worker.plans) == 1


async def test_choices_are_forked_again_from_the_prompt_on_the_worker_that_computes_it(
    redis_url, sockets
):
    """A draining worker is lost when the first choice has left its row, and all others were just
    forked from the blocks that it kept for them."""
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate("ab")}
    lost, other = workers.values()
    lost.gate.clear()
    other.gate.clear()
    settings = {"names": ("a", "b"), "pipeline_depth": 3}
    async with running_stack(redis_url, sockets, {"a": lost}, **settings) as stack:
        gateway = await stack.gateway()
        # Of two chunks: after the first one there is nothing to fork from.
        await gateway.submit(prompt(41), max_tokens=1, n=3)
        await until(lambda: len(lost.received) == 2, "the plans of the prompt and of the forks")
        assert len(lost.received[-1].admissions.rows) == 2
        await stack.start_worker("b", other)
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        # It has the blocks there that the prompt had on the lost worker.
        await gateway.submit(prompt(21, 2), max_tokens=20)
        await until(lambda: other.is_held_back, "its first step")
        lost.drain()
        await until(lambda: stack.engine.lanes[1].draining, "the drain")
        await stack.stop_worker("a")
        await until(lambda: stack.engine.lanes.keys() == {2}, "the loss")
        other.gate.set()
        await all_are_whole(stack, other)


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_only_the_poison_request_fails_and_the_rest_of_its_batch_finishes(
    redis_url, sockets, monkeypatch, names
):
    monkeypatch.setattr("scheduler_svc.engine.discovery.RETRY_S", 0.05)
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate(names)}
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
        [failed] = await gateway.wait_ended(bad)
        assert (failed.failure.code, info_of(failed.failure).reason) == (INTERNAL, "POISON")
        assert all(received.is_whole for received in await gateway.wait_ended(*good))
        await until(lambda: len(stack.engine.lanes) == len(workers), "all lanes")
        # Once in a batch, then alone.
        assert sum(worker.num_poisoned for worker in workers.values()) == 1 + MAX_CONCLUSIVE
        for worker in workers.values():
            await worker.check()


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a silent worker is lost."""
    monkeypatch.setattr(checking_worker, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(worker_stream, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(worker_stream, "SILENCE_S", 0.5)
    monkeypatch.setattr(worker_stream, "OPEN_TIMEOUT_S", 0.5)


@pytest.mark.usefixtures("short_silence")
async def test_a_stopped_worker_is_detected_and_ignored_when_it_resumes(redis_url, sockets):
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(4):
            await gateway.submit(prompt(9, seed), max_tokens=40, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.received.values()), "tokens")
        sleeper = workers["a"]
        assert sleeper.rows
        sleeper.awake.clear()
        num_sampled = sleeper.num_sampled_tokens
        assert all(received.is_whole for received in await gateway.wait_ended())
        assert stack.engine.lanes.keys() == {2}
        # The plan that it had is run, and its result is ignored.
        sleeper.awake.set()
        await until(lambda: len(stack.engine.lanes) == 2, "its return")
        assert sleeper.num_sampled_tokens > num_sampled
        for seed in range(4, 12):
            await gateway.submit(prompt(9, seed), max_tokens=10, seed=seed)
        await all_are_whole(stack, *workers.values())


async def test_a_worker_with_heartbeats_that_does_not_finish_its_step_is_lost(redis_url, sockets):
    workers = {name: CheckingWorker(index + 1) for index, name in enumerate("ab")}
    async with running_stack(redis_url, sockets, workers, step_timeout_s=0.5) as stack:
        gateway = await stack.gateway()
        await until(lambda: len(stack.engine.lanes) == 2, "both lanes")
        for seed in range(4):
            await gateway.submit(prompt(9, seed), max_tokens=40, seed=seed)
        await until(lambda: all(len(h.token_ids) > 2 for h in gateway.received.values()), "tokens")
        workers["a"].gate.clear()
        assert all(received.is_whole for received in await gateway.wait_ended())
        assert stack.engine.lanes.keys() == {2}
        workers["a"].gate.set()
        await until(lambda: len(stack.engine.lanes) == 2, "its return")
        await all_are_whole(stack, *workers.values())


async def test_a_plan_that_waits_for_the_lease_is_not_in_the_workers_time(redis_url, sockets):
    """Redis may respond to a commit, and only later to the renewal of the lease."""
    worker = CheckingWorker(1)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        await until(lambda: bool(stack.engine.lanes), "a lane")
        loop = stack.only_lane._loop
        hooks, released_at = loop._hooks, 0.0

        async def wait_long() -> None:
            nonlocal released_at
            await asyncio.sleep(0.05)
            await hooks.wait_for_lease()
            released_at = released_at or time.perf_counter()

        loop._hooks = replace(hooks, wait_for_lease=wait_long)
        worker.gate.clear()
        await gateway.submit(prompt(9, 0), max_tokens=10, seed=0)
        await until(lambda: bool(loop.in_flight), "a plan at the worker")
        assert loop.in_flight.oldest_sent_at >= released_at > 0
        worker.gate.set()
        await gateway.wait_ended()
        await all_are_whole(stack, worker)

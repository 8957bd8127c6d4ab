"""Cases with literal blocks and schedules, through a real lane: block size 16, watermark 0, and
`num_blocks` includes block 0."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from checking_worker import CheckingWorker
from google.rpc import error_details_pb2
from scheduler_stack import Gateway, Stack, running_stack
from waiting import until

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.request import seed_of_choice
from scheduler_svc.lane.lane import Lane
from scheduler_svc.store import pool
from scheduler_svc.store.types import Commit

INTERNAL, RESOURCE_EXHAUSTED = 13, 8


def worker_of(
    num_blocks: int, max_model_len: int | None = None, max_num_seqs: int = 8
) -> CheckingWorker:
    """A worker whose pool holds, by default, exactly one sequence of `max_model_len`."""
    return CheckingWorker(
        incarnation=1,
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=max_model_len or 16 * (num_blocks - 1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1024,
    )


@contextlib.asynccontextmanager
async def late_worker(
    redis_url: str, sockets: Path, **settings: object
) -> AsyncIterator[tuple[Stack, Gateway]]:
    """A scheduler whose worker, `a`, is started by `start_together`."""
    settings = {"watermark": 0, "names": ("a",), **settings}
    async with running_stack(redis_url, sockets, {}, **settings) as stack:
        yield stack, await stack.gateway()


async def start_together(stack: Stack, worker: CheckingWorker) -> None:
    """Start the worker once all requests are accepted, so that one step considers them all."""
    [gateway] = stack.gateways
    await until(lambda: all(one.accepted for one in gateway.received.values()), "acceptance")
    await stack.start_worker("a", worker)


async def lane_of(stack: Stack) -> Lane:
    engine = stack.engine
    assert engine is not None
    await until(lambda: bool(engine.lanes), "the lane")
    [lane] = engine.lanes.values()
    return lane


async def free_order(stack: Stack) -> tuple[int, ...]:
    lane = await lane_of(stack)
    await until(lambda: lane.is_empty, "an empty lane")
    return (await lane.pool.audit()).free_order


def prompt(length: int, tag: int = 0) -> list[int]:
    return [tag * 1000 + index for index in range(length)]


def tables(plan: worker_pb2.BatchPlan) -> list[list[int]]:
    """Block tables of a plan's admissions."""
    blocks = iter(plan.admissions.block_ids)
    return [[next(blocks) for _ in range(count)] for count in plan.admissions.num_blocks]


def schedules(worker: CheckingWorker) -> list[list[int]]:
    """Scheduled tokens of each plan that runs rows, in the order of the rows."""
    return [
        [count for _, count in sorted(zip(s.rows, s.num_scheduled_tokens, strict=True))]
        for s in (plan.schedule for plan in worker.plans)
        if s.rows
    ]


def admitted_seeds(worker: CheckingWorker) -> list[int]:
    return [seed for plan in worker.plans for seed in plan.admissions.seeds]


async def check_outputs(gateway: Gateway) -> None:
    for received in await gateway.wait_ended():
        for index, choice in enumerate(received.choices):
            assert choice.token_ids == received.output(index)


async def test_a_prefix_is_shared_and_outlives_its_tails(redis_url, sockets):
    shared, worker = prompt(48), worker_of(11)
    async with late_worker(redis_url, sockets) as (stack, gateway):
        first = await gateway.submit([*shared, *prompt(7, 1)], max_tokens=2)
        second = await gateway.submit([*shared, *prompt(5, 2)], max_tokens=4)
        await start_together(stack, worker)
        one, other = await gateway.wait_ended(first, second)
        assert tables(worker.plans[0]) == [[1, 2, 3, 4], [1, 2, 3, 5]]
        assert list(worker.plans[0].admissions.num_computed_tokens) == [0, 48]
        assert one.end.num_cached_prompt_tokens == 0
        assert other.end.num_cached_prompt_tokens == 48
        assert await free_order(stack) == (5, 4, 6, 7, 8, 9, 10, 3, 2, 1)


async def test_long_prompts_are_chunked_to_the_threshold_and_to_the_budget(redis_url, sockets):
    worker = worker_of(200, 1600)
    async with late_worker(redis_url, sockets, long_prefill_token_threshold=400) as (
        stack,
        gateway,
    ):
        for tag in range(3):
            await gateway.submit(prompt(800, tag), max_tokens=2)
        await start_together(stack, worker)
        await check_outputs(gateway)
        assert schedules(worker)[:3] == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


async def test_a_short_prompt_overtakes_long_ones_beyond_their_limit(redis_url, sockets):
    worker = worker_of(400, 1600)
    async with late_worker(
        redis_url, sockets, long_prefill_token_threshold=400, max_long_partial_prefills=1
    ) as (stack, gateway):
        for tag in range(4):
            await gateway.submit(prompt(800, tag), max_tokens=2)
        await gateway.submit(prompt(10, 4), max_tokens=2)
        await start_together(stack, worker)
        await check_outputs(gateway)
        # The rest of the first one is not long any more: the next one is admitted.
        assert schedules(worker)[:2] == [[400, 10], [400, 1, 400]]


async def test_the_second_of_two_equal_prompts_computes_its_partial_block_only(redis_url, sockets):
    worker = worker_of(65)
    async with late_worker(redis_url, sockets) as (stack, gateway):
        for seed in range(2):
            await gateway.submit(prompt(100), seed=seed, max_tokens=3)
        await start_together(stack, worker)
        await check_outputs(gateway)
        assert schedules(worker)[0] == [100, 4]


async def test_a_prompt_that_equals_a_request_and_its_output_hits_all_full_blocks(
    redis_url, sockets
):
    worker = worker_of(65)
    async with late_worker(redis_url, sockets) as (stack, gateway):
        await gateway.submit(prompt(100), max_tokens=200)
        await start_together(stack, worker)
        [first] = await gateway.wait_ended()
        await free_order(stack)
        worker.plans.clear()
        await gateway.wait_ended(
            await gateway.submit([*prompt(100), *first.token_ids], max_tokens=1)
        )
        assert list(worker.plans[0].admissions.num_computed_tokens) == [288]
        assert schedules(worker) == [[12]]


async def test_the_last_is_preempted_when_the_first_decodes_and_its_late_token_is_kept(
    redis_url, sockets
):
    worker = worker_of(11)
    async with late_worker(redis_url, sockets, enable_prefix_caching=False, pipeline_depth=2) as (
        stack,
        gateway,
    ):
        for tag in (1, 2):
            await gateway.submit(prompt(80, tag), seed=tag, max_tokens=4, num_logprobs=1)
        await start_together(stack, worker)
        await check_outputs(gateway)
        first, second = worker.plans[:2]
        assert tables(first) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
        assert list(first.schedule.num_scheduled_tokens) == [80, 80]
        # Its blocks are returned last to first to the front of the free list: block 6 is next.
        assert list(second.released_rows) == [1]
        assert list(second.schedule.rows) == [0]
        assert list(second.appends.block_ids) == [6]
        [again] = [plan.admissions for plan in worker.plans[1:] if plan.admissions.rows]
        assert list(again.num_prompt_tokens) == [80]
        assert list(again.num_tokens) == [81]
        assert list(again.token_ids)[80:] == gateway.received[2].token_ids[:1]
        assert (await lane_of(stack)).stats.num_preempted_by_recompute == 1


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
async def test_no_token_is_computed_after_the_last_one(redis_url, sockets, max_tokens, depth):
    worker = worker_of(11)
    async with late_worker(redis_url, sockets, pipeline_depth=depth) as (stack, gateway):
        for length in (1, 16, 17):
            await gateway.submit(prompt(length, length), max_tokens=max_tokens)
        await start_together(stack, worker)
        await check_outputs(gateway)
        assert worker.num_scheduled_tokens == 1 + 16 + 17 + 3 * (max_tokens - 1)


@pytest.mark.parametrize(("num_blocks", "num_preempted"), [(12, 1), (13, 0)])
async def test_a_step_preempts_only_if_a_block_is_missing(
    redis_url, sockets, num_blocks, num_preempted
):
    worker = worker_of(num_blocks)
    async with late_worker(redis_url, sockets, enable_prefix_caching=False) as (stack, gateway):
        for tag in (1, 2):
            await gateway.submit(prompt(80, tag), seed=tag, max_tokens=4)
        await start_together(stack, worker)
        await check_outputs(gateway)
        assert (await lane_of(stack)).stats.num_preempted_by_recompute == num_preempted


@pytest.mark.parametrize(
    ("length", "source", "siblings", "copies"),
    [
        # The block with the prompt's last token is copied; the blocks before it are shared.
        (40, [1, 2, 3], [[1, 2, 4], [1, 2, 5], [1, 2, 6]], [(3, 4), (3, 5), (3, 6)]),
        # That block is full, and the source continues in a new block.
        (48, [1, 2, 3], [[1, 2, 5], [1, 2, 6], [1, 2, 7]], [(3, 5), (3, 6), (3, 7)]),
        # That block would hold only that token.
        (33, [1, 2, 3], [[1, 2, 4], [1, 2, 5], [1, 2, 6]], []),
        (1, [1], [[2], [3], [4]], []),
    ],
)
async def test_choices_are_forked_from_one_prompt(
    redis_url, sockets, length, source, siblings, copies
):
    worker = worker_of(33)
    async with late_worker(redis_url, sockets) as (stack, gateway):
        await gateway.submit(prompt(length), seed=9, max_tokens=5, n=4)
        await start_together(stack, worker)
        await check_outputs(gateway)
        first, second = worker.plans[:2]
        assert tables(first) == [source]
        assert list(first.schedule.num_scheduled_tokens) == [length]
        assert tables(second) == siblings
        assert list(zip(second.copies.sources, second.copies.destinations, strict=True)) == copies
        assert list(second.admissions.num_computed_tokens) == [length - 1] * 3
        assert admitted_seeds(worker) == [seed_of_choice(9, choice) for choice in range(4)]
        assert worker.num_scheduled_tokens == length + 3 + 4 * 4


async def test_a_failed_row_withdraws_its_hashes_and_its_sharers_are_recomputed(redis_url, sockets):
    shared, worker = prompt(48), worker_of(33)
    worker.failing_seeds.add(13)
    async with late_worker(redis_url, sockets) as (stack, gateway):
        bad = await gateway.submit([*shared, *prompt(7, 1)], seed=13)
        good = await gateway.submit([*shared, *prompt(5, 2)], seed=2, max_tokens=9)
        other = await gateway.submit(prompt(20, 3), seed=3, max_tokens=9)
        await start_together(stack, worker)
        failed, recomputed, undisturbed = await gateway.wait_ended(bad, good, other)
        assert failed.failure.code == INTERNAL
        assert recomputed.token_ids == recomputed.tokens(9)
        assert undisturbed.token_ids == undisturbed.tokens(9)
        assert admitted_seeds(worker) == [13, 2, 3, 2]
        [again] = [plan.admissions for plan in worker.plans[1:] if plan.admissions.rows]
        assert list(again.num_computed_tokens) == [0]
        # What was recomputed may be shared again.
        [last] = await gateway.wait_ended(await gateway.submit([*shared, *prompt(5, 2)], seed=4))
        assert last.end.num_cached_prompt_tokens == 48
        assert last.token_ids == last.tokens(4)


async def step_begun_after(worker: CheckingWorker, num_plans: int) -> None:
    await until(lambda: len(worker.plans) > num_plans, "the next plan")


async def held_before_a_swap(worker: CheckingWorker) -> worker_pb2.BatchPlan:
    """Let steps run one by one until the plan after the one that is held swaps a group out."""
    while True:
        await until(lambda: worker.is_held_back and bool(worker.received), "two plans")
        if worker.received[0].swap_outs.sources:
            return worker.received[0]
        num_plans = len(worker.plans)
        worker.gate.set()
        worker.gate.clear()
        await step_begun_after(worker, num_plans)


async def test_blocks_of_a_row_that_fails_while_it_is_swapped_out_are_withdrawn(
    redis_url, sockets, monkeypatch
):
    withdrawn: list[int] = []
    pack = pool.pack_commit

    def noted(commit: Commit) -> list[bytes]:
        withdrawn.extend(commit.withdrawals)
        return pack(commit)

    monkeypatch.setattr(pool, "pack_commit", noted)
    worker = CheckingWorker(1, num_blocks=24, num_host_blocks=64)
    worker.gate.clear()
    async with running_stack(redis_url, sockets, {"a": worker}, watermark=0) as stack:
        gateway = await stack.gateway()
        sent = {
            seed: await gateway.submit(prompt(9, seed), seed=seed, max_tokens=20, n=2)
            for seed in (1, 2, 3)
        }
        swapping = await held_before_a_swap(worker)
        seeds = {worker.seeds[row] for row in swapping.released_rows}
        [failing] = [seed for seed in sent if seed_of_choice(seed, 0) in seeds]
        worker.failing_seeds.add(seed_of_choice(failing, 0))
        worker.gate.set()
        [failed] = await gateway.wait_ended(sent[failing])
        assert failed.failure.code == INTERNAL
        await gateway.wait_ended()
    await worker.check()
    assert withdrawn
    assert set(withdrawn) <= set(swapping.swap_outs.sources)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3, 4]), ("priority", [2, 4, 3, 1])])
async def test_the_scheduling_policy_sets_the_order_of_service(redis_url, sockets, policy, order):
    worker = worker_of(11, max_num_seqs=1)
    async with late_worker(redis_url, sockets, scheduling_policy=policy) as (stack, gateway):
        for seed, priority in ((1, 5), (2, -1), (3, 0), (4, -1)):
            await gateway.submit(prompt(8, seed), seed=seed, max_tokens=2, priority=priority)
        await start_together(stack, worker)
        await check_outputs(gateway)
        assert admitted_seeds(worker) == order


@pytest.mark.parametrize(
    "bound", [{"max_waiting_requests": 2}, {"max_waiting_tokens": 20}], ids=["requests", "tokens"]
)
async def test_a_full_queue_refuses_with_a_time_to_retry(redis_url, sockets, bound):
    async with late_worker(redis_url, sockets, **bound) as (stack, gateway):
        waiting = [await gateway.submit(prompt(8, tag), seed=tag) for tag in range(2)]
        await until(lambda: all(gateway.received[a].accepted for a in waiting), "acceptance")
        [refused] = await gateway.wait_ended(await gateway.submit(prompt(8)))
        assert not refused.accepted
        assert refused.failure.code == RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in refused.failure.details)
        assert retry.retry_delay.seconds > 0
        await stack.start_worker("a", worker_of(11))
        await gateway.wait_ended(*waiting)
        [received] = await gateway.wait_ended(await gateway.submit(prompt(8)))
        assert received.token_ids == received.tokens(4)


class CountingWorker(CheckingWorker):
    """Reads plans as they arrive and counts those without a result."""

    num_pending = 0
    max_pending = 0

    async def Execute(self, request_iterator, context):  # noqa: N802
        received: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()

        async def read() -> None:
            async for request in request_iterator:
                if request.HasField("plan"):
                    self.num_pending += 1
                    self.max_pending = max(self.max_pending, self.num_pending)
                received.put_nowait(request)

        async def requests() -> AsyncIterator[worker_pb2.ExecuteRequest]:
            while True:
                yield await received.get()

        reader = asyncio.create_task(read())
        try:
            async for response in super().Execute(requests(), context):
                self.num_pending -= response.HasField("result")
                yield response
        finally:
            reader.cancel()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
async def test_no_more_plans_are_in_flight_than_the_depth(redis_url, sockets, depth):
    worker = CountingWorker(incarnation=1)
    async with running_stack(redis_url, sockets, {"a": worker}, pipeline_depth=depth) as stack:
        gateway = await stack.gateway()
        worker.gate.clear()
        for seed in range(3):
            await gateway.submit(prompt(10, seed), seed=seed, max_tokens=12)
        await until(lambda: worker.num_pending == depth, "as many plans as there may be")
        # The lane has more work, and time to send it.
        lane = await lane_of(stack)
        lane.wake()
        await gateway.wait_ended(await gateway.submit([0] * 64))
        assert worker.max_pending == depth
        worker.gate.set()
        await gateway.wait_ended()
        assert worker.max_pending == depth


async def test_lookahead_slots_need_no_room_beyond_the_longest_sequence(redis_url, sockets):
    worker = worker_of(11)
    async with late_worker(redis_url, sockets, num_lookahead_slots=20) as (stack, gateway):
        await gateway.submit(prompt(100), max_tokens=60)
        await gateway.submit(prompt(150, 1), seed=2, max_tokens=10)
        await start_together(stack, worker)
        await check_outputs(gateway)
        await worker.check()

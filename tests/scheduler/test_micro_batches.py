"""Micro-batches of a worker with several stages: plans in flight have different rows, all stages
are busy, and no row waits longer than others."""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from checking_worker import CheckingWorker
from scheduler_stack import prompt, running_stack
from waiting import until

from scheduler_svc.core.policy import schedule
from scheduler_svc.core.view import LaneView, Limits, Policy, StepDecision

LIMITS = Limits(block_size=16, max_num_batched_tokens=64, max_num_seqs=100, watermark=0)


@dataclass(eq=False)
class Row:
    order: tuple[int, int, int]
    num_tokens: int
    num_computed_tokens: int = 0
    last_step: int = 0
    max_num_tokens: int = 2**31
    is_abandoned: bool = False
    is_beam: bool = False
    num_lookahead_tokens: int = 0
    block_ids: list[int] = field(default_factory=lambda: list(range(100)))


def decoding(count: int) -> list[Row]:
    return [Row((0, arrival, 0), 20, 19) for arrival in range(count)]


class Pipeline:
    """A lane whose results arrive in order, one for each plan that does not fit into the stages."""

    def __init__(self, running: list[Row], num_stages: int, limits: Limits = LIMITS) -> None:
        self.running = running
        self.num_stages = num_stages
        self.limits = limits
        self.in_flight: deque[list[Row]] = deque()
        self.steps: list[list[Row]] = []
        self.sizes_in_flight: list[int] = []

    def step(self) -> StepDecision[Row]:
        """Decide a step; without one, or with one in each stage, the oldest result arrives."""
        in_flight = frozenset(row for rows in self.in_flight for row in rows)
        view = LaneView(
            self.running,
            num_free_blocks=1000,
            num_usable_blocks=1000,
            num_micro_batches=self.num_stages,
            in_flight=in_flight,
        )
        decision = schedule(self.limits, view)
        if decision.scheduled:
            assert in_flight.isdisjoint(decision.scheduled)
            self._send(decision)
        if not decision.scheduled or len(self.in_flight) == self.num_stages:
            self.in_flight.popleft()
        return decision

    def _send(self, decision: StepDecision[Row]) -> None:
        self.steps.append(decision.scheduled)
        pairs = zip(decision.scheduled, decision.num_scheduled_tokens, strict=True)
        for row, count in pairs:
            row.last_step = len(self.steps)
            row.num_computed_tokens += count
            row.num_tokens += row.num_computed_tokens == row.num_tokens
        self.in_flight.append(decision.scheduled)
        self.sizes_in_flight.append(len(self.in_flight))


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [4, 5, 7, 16, 33])
def test_all_stages_are_busy_and_no_row_waits(
    policy: Policy, num_stages: int, num_rows: int
) -> None:
    limits = Limits(16, 64, 100, 0, policy)
    lane = Pipeline(decoding(num_rows), num_stages, limits)
    for _ in range(20 * num_stages):
        lane.step()
    # Once the pipeline is filled, a step runs in each stage.
    assert set(lane.sizes_in_flight[num_stages:]) == {num_stages}
    sizes = [len(rows) for rows in lane.steps]
    assert max(sizes) == -(-num_rows // num_stages)
    counts = Counter(row for rows in lane.steps for row in rows)
    assert len(counts) == num_rows
    assert max(counts.values()) - min(counts.values()) <= 1


def test_micro_batches_are_about_equal() -> None:
    lane = Pipeline(decoding(32), 3)
    for _ in range(30):
        lane.step()
    assert {len(rows) for rows in lane.steps} <= {10, 11}


def test_rows_that_come_later_join_the_smaller_micro_batch() -> None:
    lane = Pipeline(decoding(8), 2)
    for _ in range(6):
        lane.step()
    lane.running += [Row((0, 50 + arrival, 0), 20, 19) for arrival in range(4)]
    for _ in range(12):
        lane.step()
    assert [len(rows) for rows in lane.steps[-4:]] == [6, 6, 6, 6]


def test_prompts_run_beside_the_decodes_of_other_rows() -> None:
    """One chunk of a prompt at a time; the other stages decode meanwhile."""
    prompt_row = Row((0, 9, 0), 200)
    lane = Pipeline([*decoding(6), prompt_row], 2)
    for _ in range(12):
        lane.step()
    for before, after in pairwise(lane.steps):
        assert set(before).isdisjoint(after)
    assert prompt_row.num_computed_tokens >= 200
    assert set(lane.sizes_in_flight[2:]) == {2}


def test_beams_run_together() -> None:
    beams = [Row((0, 0, choice), 20, 19, is_beam=True) for choice in range(6)]
    lane = Pipeline([*beams, *(Row((0, 1 + at, 0), 20, 19) for at in range(4))], 2)
    for _ in range(10):
        lane.step()
    for rows in lane.steps:
        assert len(set(rows) & set(beams)) in (0, 6)
    counts = Counter(row for rows in lane.steps for row in rows)
    assert min(counts.values()) >= 4


def test_a_lone_row_runs_through_one_stage_after_the_other() -> None:
    lane = Pipeline(decoding(1), 3)
    for _ in range(8):
        lane.step()
    assert lane.sizes_in_flight == [1, 1, 1, 1]


@pytest.mark.parametrize("num_stages", [2, 3])
async def test_a_lane_has_a_plan_in_each_stage(
    redis_url: str, sockets: Path, num_stages: int
) -> None:
    """With `CheckingWorker`, which reports rows that are in two plans in flight."""
    worker = CheckingWorker(1, num_blocks=256, num_stages=num_stages, max_num_seqs=16)
    async with running_stack(redis_url, sockets, {"a": worker}) as stack:
        gateway = await stack.gateway()
        worker.hold_after = 80
        for seed in range(12):
            await gateway.submit(prompt(9, seed), max_tokens=30, seed=seed)
        await until(lambda: sum(map(len, worker.rows_in_flight)) == 12, "plans in flight")
        assert [len(rows) for rows in worker.rows_in_flight] == [12 // num_stages] * num_stages
        worker.gate.set()
        for received in await gateway.wait_ended():
            assert received.choices[0].token_ids == received.output(0)
    await worker.check()


async def test_choices_are_preempted_and_swapped_in_micro_batches(
    redis_url: str, sockets: Path
) -> None:
    worker = CheckingWorker(
        1, num_blocks=24, num_host_blocks=64, num_stages=2, max_num_seqs=8, max_model_len=64
    )
    async with running_stack(redis_url, sockets, {"a": worker}, watermark=0) as stack:
        gateway = await stack.gateway()
        for seed in range(4):
            await gateway.submit(prompt(9, seed), max_tokens=20, seed=seed, n=3)
        await gateway.submit(prompt(20, 7), max_tokens=30, seed=9)
        for received in await gateway.wait_ended():
            for index, choice in enumerate(received.choices):
                assert choice.token_ids == received.output(index)
    assert worker.num_swapped_blocks
    await worker.check()

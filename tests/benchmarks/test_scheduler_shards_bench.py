"""Parts of the scheduler's benchmark that measure shards: cases, targets, kept rows."""

from dataclasses import fields

import pytest

from benchmarks.report import Cell
from benchmarks.scheduler.fleet import Counters
from benchmarks.scheduler.shards import CASES, Case, rate, shards, step_ms, targets
from benchmarks.scheduler.throughput import Effort


def row(case: Case, of_ideal: float, scheduler_ms: float) -> dict[str, Cell]:
    return {
        "shards": case.num_shards,
        "schedulers": case.num_schedulers,
        "step_ms": case.step_ms,
        "of_ideal": of_ideal,
        "scheduler_ms": scheduler_ms,
    }


def test_the_time_per_step_is_compared_with_one_shard() -> None:
    rows = [row(Case(1, 1), 0.99, 1.0), row(Case(2, 2), 0.97, 1.2), row(Case(8, 1), 0.98, 0.5)]
    found = {target.what: (target.measured, target.met) for target in targets(rows)}
    assert found == {
        "1 shards in 1 schedulers, 400 ms, of ideal": ("0.990", True),
        "2 shards in 2 schedulers, 400 ms, of ideal": ("0.970", False),
        "8 shards in 1 schedulers, 400 ms, of ideal": ("0.980", True),
        "2 shards in 2 schedulers, 400 ms, CPU per step beside one shard": ("+20.0%", False),
        "8 shards in 1 schedulers, 400 ms, CPU per step beside one shard": ("-50.0%", True),
    }


def test_steps_of_different_durations_are_not_compared() -> None:
    rows = [row(Case(1, 1), 0.99, 1.0), row(Case(1, 1, 200.0), 0.99, 0.5)]
    rows.append(row(Case(8, 8, 200.0), 0.99, 0.6))
    measured = [target.measured for target in targets(rows) if "CPU" in target.what]
    assert measured == ["+20.0%"]


def test_without_one_shard_nothing_is_compared() -> None:
    [target] = targets([row(Case(2, 2), 0.99, 1.0)])
    assert target.what == "2 shards in 2 schedulers, 400 ms, of ideal"


def test_rows_of_earlier_runs_stay_in_the_order_of_cases() -> None:
    earlier = [row(case, 0.99, 1.0) for case in reversed(CASES)]
    part = shards([], 64, Effort(1, 1.0), earlier)
    found = [Case(one["shards"], one["schedulers"], one["step_ms"]) for one in part.rows]
    assert found == sorted(CASES)
    assert all(target.met for target in part.targets)


@pytest.mark.parametrize("case", CASES)
def test_no_scheduler_is_without_a_shard(case: Case) -> None:
    assert case.num_schedulers <= case.num_shards


def test_rates_are_those_between_the_last_tokens_of_each_stream() -> None:
    before = [(0, 10.0), (100, 10.5), (7, 3.0)]
    after = [(512, 12.0), (356, 11.5), (7, 3.0)]
    assert rate(before, after) == 256 + 256


def test_a_step_s_duration_does_not_depend_on_what_lanes_have_recorded() -> None:
    # Ten steps of each of two workers in two seconds; of eight of them the time is recorded.
    counts = {field.name: 0 for field in fields(Counters)}
    idle_ns, busy_ns = 8 * 10_000_000, 8 * 190_000_000
    used = Counters(
        **{**counts, "at_s": 2, "num_steps": 20, "idle_ns": idle_ns, "busy_ns": busy_ns}
    )
    assert step_ms(used, 2) == pytest.approx(190)

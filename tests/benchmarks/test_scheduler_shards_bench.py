"""Parts of the scheduler's benchmark that measure shards: cases, rounds, targets."""

from dataclasses import fields

import pytest

from benchmarks.report import Cell
from benchmarks.scheduler.fleet import Counters
from benchmarks.scheduler.shards import CASES, Case, rate, step_ms, summary, targets
from benchmarks.scheduler.throughput import Effort
from scheduler_svc.lane.journal_compaction import COMPACT_EVERY_STEPS

ONE, TWO, EIGHT_IN_ONE = Case(1, 1), Case(2, 2), Case(8, 1)


def figures(of_ideal: float, scheduler_ms: float, workers_ms: float = 1.0) -> dict[str, Cell]:
    return {"of_ideal": of_ideal, "scheduler_ms": scheduler_ms, "workers_ms": workers_ms}


def test_the_time_per_step_is_compared_with_one_shard() -> None:
    one_round = {
        ONE: figures(0.99, 1.0),
        TWO: figures(0.97, 1.2),
        EIGHT_IN_ONE: figures(0.98, 0.5),
    }
    found = {one.what: (one.measured, one.met) for one in targets(summary([one_round]))}
    assert found == {
        "1 shards in 1 schedulers, of ideal": ("0.990", True),
        "2 shards in 2 schedulers, of ideal": ("0.970", False),
        "8 shards in 1 schedulers, of ideal": ("0.980", True),
        "2 shards in 2 schedulers, CPU per step beside one shard": ("+20.0%", False),
        "8 shards in 1 schedulers, CPU per step beside one shard": ("-50.0%", True),
    }


def test_growths_are_medians_of_those_within_rounds() -> None:
    # In the second round the machine has half of the speed, in the third it slows down in between.
    rounds = [
        {ONE: figures(1.0, 1.0, 2.0), TWO: figures(0.9, 1.1, 2.0)},
        {TWO: figures(0.8, 2.4, 4.0), ONE: figures(1.0, 2.0, 4.0)},
        {ONE: figures(1.0, 1.0, 2.0), TWO: figures(1.0, 1.8, 3.0)},
    ]
    one, two = summary(rounds)
    assert (one["scheduler_ms"], one["growth"], one["relative_growth"]) == (1.0, None, None)
    assert (two["of_ideal"], two["scheduler_ms"]) == (0.9, 1.8)
    assert two["growth"] == pytest.approx(0.2)
    assert two["relative_growth"] == pytest.approx(0.2)


def test_without_one_shard_nothing_is_compared() -> None:
    [target] = targets(summary([{TWO: figures(0.99, 1.0)}]))
    assert target.what == "2 shards in 2 schedulers, of ideal"


@pytest.mark.parametrize("step_ms", [0.5, 10.0, 160.0, 400.0])
def test_windows_have_whole_periods_of_the_journals_compaction(step_ms: float) -> None:
    effort = Effort(3, 4.0).of_steps(step_ms)
    periods = effort.window_s * 1000 / step_ms / COMPACT_EVERY_STEPS
    assert periods == pytest.approx(round(periods))
    assert effort.window_s > 3.999
    assert effort.of_steps(step_ms) == effort


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

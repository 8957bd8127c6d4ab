"""Decoding by the number of shards and of the schedulers that lead them."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.fleet import Counters, Fleet, FleetSetting
from benchmarks.scheduler.throughput import Effort, full_rows
from benchmarks.scheduler.workload import Workload

_NUM_ROWS = 256
# Slow enough for two cores to run all processes: half of them is in use.
_STEP_MS = 200.0
_FILL_TIMEOUT_S = 150.0
_MOST_AT_ONCE = 1024
_LEAST_OF_IDEAL = 0.98
_MOST_GROWTH = 0.1
_PROMPT_TOKENS = (17, 48)
# The load generator and the workers work between steps, too.
_PAUSE_S = 0.3


@dataclass(frozen=True, order=True)
class Case:
    """Shards, and the processes that lead them."""

    num_shards: int
    num_schedulers: int


_ONE = Case(1, 1)
CASES = (_ONE, Case(2, 2), Case(4, 4), Case(8, 8), Case(8, 1))


def shards(cases: Sequence[Case], num_workers: int, effort: Effort, num_rounds: int) -> Part:
    """Measure all cases in each round; in every other one in the reverse order, so that what the
    machine does in one half of a round favours none of them."""
    rounds: list[dict[Case, dict[str, Cell]]] = []
    for number in range(num_rounds):
        order = cases if number % 2 == 0 else cases[::-1]
        rounds.append({case: _row(case, num_workers, effort) for case in order})
    rows = summary(rounds)
    return Part(
        name="shards",
        title=f"Shards, with {num_workers} workers of {_NUM_ROWS} rows",
        notes=[
            f"Every row decodes, at {_STEP_MS:g} ms per step. *CPU* is the processor time of each "
            "kind of process per step of one worker, by the Linux kernel's counters, with all that "
            "its processes do besides steps. The schedulers are not instrumented. *Growth* is that "
            "of the schedulers' time over the one of one shard, *per worker's* the same with each "
            "divided by the workers' time, which does not depend on shards but on the machine's "
            f"speed. All cases are measured in each of {num_rounds} rounds; figures are medians of "
            "the rounds, growths those of the growths within rounds. *Cores* are those used by all "
            f"processes together, of {len(os.sched_getaffinity(0))}. A *call* of Redis is a "
            "script.",
        ],
        columns=[
            Column("shards", "shards", "d"),
            Column("schedulers", "schedulers", "d"),
            Column("tokens_per_s", "tokens/s", ",.0f"),
            Column("of_ideal", "of ideal", ".3f"),
            Column("scheduler_ms", "CPU ms per step: schedulers", ".2f"),
            Column("redis_ms", "Redis", ".2f"),
            Column("workers_ms", "workers", ".2f"),
            Column("load_ms", "load", ".2f"),
            Column("growth", "growth", "+.0%"),
            Column("relative_growth", "per worker's", "+.0%"),
            Column("redis_calls", "Redis calls per step", ".2f"),
            Column("worker_step_ms", "measured step ms", ".1f"),
            Column("cores", "cores", ".2f"),
        ],
        rows=rows,
        targets=targets(rows),
    )


def summary(rounds: Sequence[dict[Case, dict[str, Cell]]]) -> list[dict[str, Cell]]:
    """Medians of the figures of rounds, and of the growths within them, by case."""
    return [
        {
            "shards": case.num_shards,
            "schedulers": case.num_schedulers,
            **{key: median(float(one[case][key] or 0) for one in rounds) for key in figures},
            **_growths(case, rounds),
        }
        for case, figures in sorted(rounds[0].items())
    ]


def _growths(case: Case, rounds: Sequence[dict[Case, dict[str, Cell]]]) -> dict[str, Cell]:
    if case == _ONE or _ONE not in rounds[0]:
        return {"growth": None, "relative_growth": None}

    def cost(row: dict[str, Cell], is_relative: bool) -> float:
        return float(row["scheduler_ms"] or 0) / (
            float(row["workers_ms"] or 1) if is_relative else 1
        )

    growth, relative = (
        median(cost(one[case], is_relative) / cost(one[_ONE], is_relative) - 1 for one in rounds)
        for is_relative in (False, True)
    )
    return {"growth": growth, "relative_growth": relative}


def targets(rows: Sequence[dict[str, Cell]]) -> list[Target]:
    """Of ideal in every row; the growth of the schedulers' time in all but that of one shard."""
    growths = [row for row in rows if row["growth"] is not None]
    return [_of_ideal(row) for row in rows] + [_growth(row) for row in growths]


def filled(fleet: Fleet, max_tokens: int) -> None:
    """Fill every row of every worker with a sequence that decodes until the end.

    Requests come in parts: all at once would occupy two cores for seconds, in which leases expire.
    """
    rows = int(fleet.setting.model["max_num_seqs"])
    workers = [shard.num_workers for shard in fleet.view.shards]
    at_once = max(1, _MOST_AT_ONCE // sum(workers))
    num_started = 0
    for first in range(0, rows, at_once):
        shares = [number * min(at_once, rows - first) for number in workers]
        fleet.run(
            Workload(
                num_requests=sum(shares),
                concurrency=sum(shares),
                prompt_tokens=_PROMPT_TOKENS,
                output_tokens=(max_tokens, max_tokens),
                seed=first + 1,
            ),
            shares,
        )
        num_started += sum(shares)
        fleet.wait_for("started", num_started, _FILL_TIMEOUT_S)


@dataclass(frozen=True)
class Window:
    """What was counted in a window, and the tokens that arrived per second."""

    used: Counters
    tokens_per_s: float


def windows(fleet: Fleet, effort: Effort) -> list[Window]:
    found = []
    for _ in range(effort.num_windows):
        time.sleep(_PAUSE_S)
        before, tokens = fleet.counters(), fleet.tokens()
        time.sleep(effort.window_s)
        used = fleet.counters() - before
        found.append(Window(used, rate(tokens, fleet.tokens())))
    fleet.check()
    return found


def rate(before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]]) -> float:
    """Tokens per second of all streams: each has its own last arrival, which ends a step."""
    pairs = zip(before, after, strict=True)
    return sum(
        (tokens - earlier) / (at_s - from_s)
        for (earlier, from_s), (tokens, at_s) in pairs
        if at_s > from_s
    )


def per_step(found: Sequence[Window], num_workers: int) -> dict[str, Cell]:
    """Medians over windows, per step of one worker."""
    every = [window.used for window in found]

    def middle(value: str) -> float:
        return float(median(getattr(one, value) / one.num_steps for one in every))

    cores = median(
        (one.scheduler_s + one.redis_s + one.workers_s + one.load_s) / one.at_s for one in every
    )
    return {
        "tokens_per_s": median(window.tokens_per_s for window in found),
        "scheduler_ms": 1000 * middle("scheduler_s"),
        "redis_ms": 1000 * middle("redis_s"),
        "workers_ms": 1000 * middle("workers_s"),
        "load_ms": 1000 * middle("load_s"),
        "redis_calls": middle("redis_calls"),
        "redis_bytes": middle("redis_bytes"),
        "frames": middle("num_frames"),
        "frame_bytes": middle("frame_bytes"),
        "worker_messages": middle("worker_messages"),
        "worker_bytes": middle("worker_bytes"),
        "worker_step_ms": median(step_ms(one.used, num_workers) for one in found),
        "cores": cores,
    }


def step_ms(used: Counters, num_workers: int) -> float:
    """The duration of a step, from the share of their time in which the workers had a plan: lanes
    record the time of several steps together, and those of a window's ends are not in it."""
    busy_s = num_workers * used.at_s * used.busy_ns / (used.busy_ns + used.idle_ns)
    return 1000 * busy_s / used.num_steps


def _name(row: dict[str, Cell]) -> str:
    return f"{row['shards']} shards in {row['schedulers']} schedulers"


def _row(case: Case, num_workers: int, effort: Effort) -> dict[str, Cell]:
    effort = replace(effort.of_steps(_STEP_MS), num_windows=1)
    model = dict(full_rows(num_workers, _NUM_ROWS, _STEP_MS, effort).model)
    # The first rows decode while the last ones are filled.
    model["max_model_len"] += int(_FILL_TIMEOUT_S * 1000 / _STEP_MS)
    model["num_blocks"] = int(_NUM_ROWS * -(-model["max_model_len"] // 16) * 1.02) + 2
    setting = FleetSetting(
        num_workers=num_workers,
        num_shards=case.num_shards,
        num_schedulers=case.num_schedulers,
        model=model,
        scheduler={"max-num-seqs": _NUM_ROWS, "max-waiting-requests": 1_000_000},
    )
    with Fleet(setting) as fleet:
        filled(fleet, int(model["max_model_len"]) - _PROMPT_TOKENS[1])
        figures = per_step(windows(fleet, effort), num_workers)
    ideal = num_workers * _NUM_ROWS * 1000 / _STEP_MS
    return {**figures, "of_ideal": float(figures["tokens_per_s"] or 0) / ideal}


def _of_ideal(row: dict[str, Cell]) -> Target:
    of_ideal = float(row["of_ideal"] or 0)
    what = f"{_name(row)}, of ideal"
    aim = f"at least {_LEAST_OF_IDEAL:g}"
    return Target(what, aim, f"{of_ideal:.3f}", of_ideal >= _LEAST_OF_IDEAL)


def _growth(row: dict[str, Cell]) -> Target:
    growth = float(row["growth"] or 0)
    return Target(
        f"{_name(row)}, CPU per step beside one shard",
        f"within {_MOST_GROWTH:.0%}",
        f"{growth:+.1%}",
        growth <= _MOST_GROWTH,
    )

"""Decoding with all rows in use: throughput as a share of the ideal, and cost of a step."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.measure import Window, measured
from benchmarks.scheduler.stack import BenchStack, Setting
from benchmarks.scheduler.workload import Workload
from scheduler_svc.lane.journal_compaction import COMPACT_EVERY_STEPS

BLOCK_SIZE = 16
_PROMPT_TOKENS = (17, 48)
_FILL_TIMEOUT_S = 120.0
# Steps before the first window and after the last, and a margin for clock differences.
_SPARE_STEPS = 400


@dataclass(frozen=True)
class Effort:
    """Number and length of the measured windows."""

    num_windows: int
    window_s: float

    def of_steps(self, step_ms: float) -> "Effort":
        """Return windows at least as long that each lane compacts its journal equally often in: a
        compaction of 256 rows takes as much processor time as several steps."""
        period_s = COMPACT_EVERY_STEPS * step_ms / 1000
        num_periods = math.ceil(round(self.window_s / period_s, 6))
        return replace(self, window_s=num_periods * period_s)


def full_rows(num_workers: int, num_rows: int, step_ms: float, effort: Effort) -> Setting:
    """Configure workers whose rows decode until the measurement is complete."""
    measured_s = effort.num_windows * (effort.window_s + 1) + 10
    max_model_len = _PROMPT_TOKENS[1] + int(measured_s * 1000 / step_ms) + _SPARE_STEPS
    num_blocks = int(num_rows * -(-max_model_len // BLOCK_SIZE) * 1.02) + 2
    model = {
        "max_model_len": max_model_len,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "max_num_seqs": num_rows,
        "step_ms": step_ms,
    }
    return Setting(num_workers=num_workers, model=model, scheduler={"max-num-seqs": num_rows})


def decoding(stack: BenchStack, setting: Setting) -> None:
    """Fill every row with a sequence that decodes until the measurement is complete."""
    num_requests = setting.num_workers * int(setting.model["max_num_seqs"])
    max_tokens = int(setting.model["max_model_len"]) - _PROMPT_TOKENS[1]
    stack.run(
        Workload(
            num_requests=num_requests,
            concurrency=num_requests,
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=(max_tokens, max_tokens),
        )
    )
    stack.wait_for("started", num_requests, _FILL_TIMEOUT_S)


def decode_window(num_workers: int, num_rows: int, step_ms: float, effort: Effort) -> Window:
    effort = effort.of_steps(step_ms)
    setting = full_rows(num_workers, num_rows, step_ms, effort)
    with BenchStack(setting) as stack:
        decoding(stack, setting)
        return measured(stack, effort.num_windows, effort.window_s)


def throughput(sizes: Sequence[tuple[int, float]], num_rows: int, effort: Effort) -> Part:
    """`sizes` are pairs of workers and milliseconds per step."""
    rows = [_row(num_workers, num_rows, step_ms, effort) for num_workers, step_ms in sizes]
    return Part(
        name="throughput",
        title=f"Decoding with {num_rows} rows per worker",
        notes=[
            "Every row decodes. *Of ideal* is the rate of received tokens as a share of rows / "
            "step time. *CPU* is the scheduler process's CPU time per step: the mean by the Linux "
            "kernel's counters, and percentiles of the time between two results. *Cores* are the "
            "cores used by each kind of process; if they add up to the machine's, the machine is "
            "the limit. A simulated device runs the steps in its queue back to back, as a GPU "
            "does: it idles while no plan is there, not while its process is late.",
        ],
        columns=COLUMNS,
        rows=rows,
        targets=[_target(row) for row in rows if _key(row) in _AIMS],
    )


COLUMNS = [
    Column("workers", "workers", "d"),
    Column("step_ms", "step ms", "g"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("of_ideal", "of ideal", ".3f"),
    Column("cpu_ms", "CPU ms", ".2f"),
    Column("cpu_p50_ms", "p50", ".2f"),
    Column("cpu_p99_ms", "p99", ".2f"),
    Column("redis_calls", "Redis calls", ".2f"),
    Column("redis_p50_ms", "wait p50 ms", ".2f"),
    Column("redis_p99_ms", "p99", ".2f"),
    Column("redis_server_ms", "server ms", ".2f"),
    Column("idle_share", "worker idle", ".1%"),
    Column("worker_step_ms", "worker's step ms", ".2f"),
    Column("scheduler_share", "cores: scheduler", ".2f"),
    Column("redis_share", "Redis", ".2f"),
    Column("workers_share", "workers", ".2f"),
    Column("load_share", "load", ".2f"),
    Column("cores", "all", ".2f"),
]
# Aims of single cases, in shares of the ideal.
_AIMS = {(1, 10.0): 0.98, (8, 10.0): 0.95, (16, 25.0): 0.95}
# Above this share of the machine's cores a case is limited by the machine.
_BUSY = 0.9


def _row(num_workers: int, num_rows: int, step_ms: float, effort: Effort) -> dict[str, Cell]:
    window = decode_window(num_workers, num_rows, step_ms, effort)
    ideal = num_workers * num_rows * 1000 / step_ms
    return {
        "workers": num_workers,
        "step_ms": step_ms,
        "of_ideal": window.tokens_per_s / ideal,
        **window.figures(),
        "cores": window.scheduler_share
        + window.redis_share
        + window.workers_share
        + window.load_share,
    }


def _key(row: dict[str, Cell]) -> tuple[int, float]:
    return int(row["workers"] or 0), float(row["step_ms"] or 0)


def _target(row: dict[str, Cell]) -> Target:
    """A case whose processes use up the machine's cores says nothing of the scheduler."""
    of_ideal, cores = float(row["of_ideal"] or 0), float(row["cores"] or 0)
    num_cores, aim = len(os.sched_getaffinity(0)), _AIMS[_key(row)]
    workers = f"{row['workers']} workers" if row["workers"] != 1 else "one worker"
    is_limited = of_ideal < aim and cores >= _BUSY * num_cores
    measured = f"{of_ideal:.3f}" + f", with {cores:.2f} of {num_cores} cores in use" * is_limited
    what = f"{workers} at {row['step_ms']:g} ms, of ideal"
    return Target(
        what, f"at least {aim:g}, or all cores in use", measured, is_limited or of_ideal >= aim
    )

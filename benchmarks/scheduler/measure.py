"""Measures a stack under load."""

import time
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from benchmarks.report import Cell
from benchmarks.scheduler.proc import cpu_s
from benchmarks.scheduler.stack import BenchStack

_PAUSE_S = 0.3


@dataclass(frozen=True)
class Window:
    """Figures of a time window. Milliseconds are per step, shares are of one core."""

    tokens_per_s: float
    num_steps: float
    # CPU time of the scheduler's process: all threads, from the Linux kernel's counters.
    cpu_ms: float
    # CPU time between two step results: of the process, and of the event loop's thread.
    cpu_p50_ms: float
    cpu_p99_ms: float
    loop_p50_ms: float
    # The lanes' own measure of scheduling, packing and delivery.
    scheduling_p50_ms: float
    scheduling_p99_ms: float
    # Wait for the commit, and the Redis server's time in scripts.
    redis_p50_ms: float
    redis_p99_ms: float
    redis_server_ms: float
    # Calls by lanes for steps, and all calls of the scheduler.
    redis_calls: float
    all_redis_calls: float
    # Calls in decode-only steps, and in steps that admit; None without such a step.
    decoding_calls: float | None
    admitting_calls: float | None
    admitting_share: float
    # Share of the workers' time without a plan; measured duration of a step.
    idle_share: float
    worker_step_ms: float
    scheduler_share: float
    redis_share: float
    workers_share: float
    load_share: float

    def figures(self) -> dict[str, Cell]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def measured(stack: BenchStack, num_windows: int, window_s: float) -> Window:
    """Return the median of each figure over several windows."""
    windows = []
    for _ in range(num_windows):
        # Keep the preceding reading's own work out of the window.
        time.sleep(_PAUSE_S)
        windows.append(_window(stack, window_s))
    stack.check()
    return Window(*(_median([getattr(w, field.name) for w in windows]) for field in fields(Window)))


def _median(values: list[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _percentile(values: list[float], percent: float) -> float:
    """Return the percentile by the nearest-rank method."""
    ordered = sorted(values)
    rank = -int(-len(ordered) * percent // 100)
    return ordered[max(0, rank - 1)]


def _window(stack: BenchStack, window_s: float) -> Window:
    before = _reading(stack)
    time.sleep(window_s)
    after = _reading(stack)
    spent = {key: after[key] - before[key] for key in after if key != "probe"}
    probe, lanes = after["probe"], after["probe"]["lanes"]
    earlier = before["probe"]["lanes"]
    passed = {key: lanes[key] - earlier[key] for key in lanes}
    num_steps = passed["num_steps"]
    worker_ns = passed["worker_idle_ns"] + passed["worker_busy_ns"]
    per_step_ms = 1000 / num_steps
    return Window(
        tokens_per_s=spent["tokens"] / spent["tokens_at_s"],
        num_steps=num_steps,
        cpu_ms=spent["scheduler"] * per_step_ms,
        cpu_p50_ms=1000 * median(probe["process_s"]),
        cpu_p99_ms=1000 * _percentile(probe["process_s"], 99),
        loop_p50_ms=1000 * median(probe["loop_s"]),
        scheduling_p50_ms=1000 * median(probe["scheduling_s"]),
        scheduling_p99_ms=1000 * _percentile(probe["scheduling_s"], 99),
        redis_p50_ms=1000 * median(probe["redis_s"]),
        redis_p99_ms=1000 * _percentile(probe["redis_s"], 99),
        redis_server_ms=spent["script_us"] / 1000 / num_steps,
        redis_calls=passed["num_redis_calls"] / num_steps,
        all_redis_calls=(probe["all_calls"] - before["probe"]["all_calls"]) / num_steps,
        decoding_calls=_calls_of(probe, "decoding"),
        admitting_calls=_calls_of(probe, "admitting"),
        admitting_share=probe["steps_by_kind"].get("admitting", 0) / num_steps,
        idle_share=passed["worker_idle_ns"] / worker_ns,
        worker_step_ms=passed["worker_busy_ns"] / 1e6 / num_steps,
        scheduler_share=spent["scheduler"] / spent["at_s"],
        redis_share=spent["redis"] / spent["at_s"],
        workers_share=spent["workers"] / spent["at_s"],
        load_share=spent["load"] / spent["at_s"],
    )


def _calls_of(probe: dict[str, Any], kind: str) -> float | None:
    num_steps = probe["steps_by_kind"].get(kind, 0)
    return probe["calls_by_kind"][kind] / num_steps if num_steps else None


def _reading(stack: BenchStack) -> dict[str, Any]:
    progress = stack.progress()
    server = stack.redis.info("cpu")
    scripts = stack.redis.info("commandstats").get("cmdstat_evalsha", {})
    return {
        **{name: sum(cpu_s(pid) for pid in pids) for name, pids in stack.pids.items()},
        "redis": server["used_cpu_user"] + server["used_cpu_sys"],
        "script_us": scripts.get("usec", 0),
        **{key: progress[key] for key in ("at_s", "tokens", "tokens_at_s")},
        "probe": stack.probe.call("collect"),
    }

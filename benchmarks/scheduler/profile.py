"""Profile of the scheduler's CPU time."""

import time
from pathlib import Path

from benchmarks.scheduler.proc import cpu_s
from benchmarks.scheduler.stack import BenchStack
from benchmarks.scheduler.throughput import Effort, decoding, full_rows

_WARMUP_S = 1.0
_ROWS = 256
_STEP_MS = 10.0
_MOST = 60


def profile(seconds: float) -> str:
    """Return the scheduler's functions and lines by ms per step, with one worker at 10 ms."""
    setting = full_rows(1, _ROWS, _STEP_MS, Effort(1, seconds))
    with BenchStack(setting) as stack:
        [pid] = stack.pids["scheduler"]
        decoding(stack, setting)
        time.sleep(_WARMUP_S)
        stack.probe.call("collect")
        stack.probe.call("start_profile")
        before_s = cpu_s(pid)
        time.sleep(seconds)
        spent_s = cpu_s(pid) - before_s
        profiled = stack.probe.call("stop_profile")
        num_steps = len(stack.probe.call("collect")["scheduling_s"])
    num_ticks = sum(count for _, count in profiled["lines"])
    tick_ms = 1000 * spent_s / num_steps / num_ticks
    sections = [
        f"{1000 * spent_s / num_steps:.2f} ms per step; {num_steps} steps, {num_ticks} ticks"
    ]
    for kind in ("functions", "lines"):
        entries = profiled[kind][:_MOST]
        sections += ["", f"ms per step, by {kind}:"]
        sections += [f"{count * tick_ms:8.3f}  {Path(name)}" for name, count in entries]
    return "\n".join(sections)

"""Runs the work on the worker's runner in process: no gRPC, no Redis, no gateway.

Each step is launched before the output of the preceding one is read, as in the worker.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

import torch
from structlog.testing import capture_logs
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.engines.batcher import Step, steps
from benchmarks.engines.child import job, serve
from benchmarks.engines.workload import Work
from worker_svc.loading.runner_loading import load_runner
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.runner.device_thread import MAX_IN_FLIGHT
from worker_svc.runner.step_runner import LoadedRunner, PendingOutput
from worker_svc.service.process import prepare_memory
from worker_svc.settings import WorkerSettings

_TIMES = ("waiting_ns", "preparing_ns", "forward_ns", "sampling_ns")
_MEASURED_STEPS = 50


class StandaloneRunner:
    """Drives a runner with a minimal scheduler."""

    def __init__(self, loaded: LoadedRunner) -> None:
        self._loaded = loaded

    def run(self, work: Work) -> dict[str, object]:
        """Run all of the work at once. Times are sums over all and over decode-only steps."""
        num_tokens = 0
        times: dict[str, Counter[str]] = {"all": Counter(), "decode": Counter()}
        began_s = time.perf_counter()
        for step, output in self._outputs(self._steps(work)):
            num_tokens += len(output.sampled_rows)
            kinds = ["all"]
            if 0 < step.num_scheduled_tokens == len(step.sampling):
                kinds.append("decode")
            for kind in kinds:
                times[kind].update({name: getattr(output.times, name) for name in _TIMES})
                times[kind]["steps"] += 1
        seconds = time.perf_counter() - began_s
        self._loaded.runner.clear()
        return {"seconds": seconds, "num_tokens": num_tokens, "times": times}

    def decode(
        self, num_rows: int, seq_len: int, num_steps: int = _MEASURED_STEPS
    ) -> dict[str, float | None]:
        """Measure decode-only steps: milliseconds per step, those between the forward passes, those
        in which the device is busy by the profiler's records, and the number of these records; None
        without records."""
        prompts = [[row % 1000 + 1] * seq_len for row in range(num_rows)]
        # The first rows decode while prompts of the last ones are prefilled.
        found = self._outputs(self._steps(Work(prompts, [4 * num_steps] * num_rows)))
        for step, _ in found:
            if step.num_scheduled_tokens == num_rows:
                break
        for _ in range(num_steps):
            next(found)
        times = [next(found)[1].times for _ in range(num_steps)]
        with _recording() as records:
            for _ in range(num_steps):
                next(found)
        for _ in found:
            pass
        self._loaded.runner.clear()
        between_ns = sum(one.waiting_ns + one.preparing_ns for one in times)
        # The phases follow one another without gaps.
        all_ns = between_ns + sum(one.forward_ns + one.sampling_ns for one in times)
        recorded = [*_on_device(records)]
        busy_us = covered(recorded)
        return {
            "step_ms": all_ns / 1e6 / num_steps,
            "between_ms": between_ns / 1e6 / num_steps,
            "busy_ms": busy_us / 1000 / num_steps if busy_us else None,
            "num_records": len(recorded) / num_steps if recorded else None,
        }

    def _steps(self, work: Work) -> Iterator[Step]:
        identity = self._loaded.identity
        return steps(
            work,
            max_num_seqs=identity.max_num_seqs,
            max_num_batched_tokens=identity.max_num_batched_tokens,
            block_size=identity.block_size,
            num_blocks=identity.num_blocks,
        )

    def _outputs(self, planned: Iterator[Step]) -> Iterator[tuple[Step, StepOutput]]:
        launched: deque[tuple[Step, PendingOutput[StepOutput]]] = deque()
        for step in planned:
            launched.append((step, self._loaded.runner.launch(plan_from_proto(step.plan))))
            if len(launched) == MAX_IN_FLIGHT:
                first, result = launched.popleft()
                yield first, result.output()
        for first, result in launched:
            yield first, result.output()


def load(settings: WorkerSettings) -> tuple[StandaloneRunner, str]:
    """Load the runner; return also its attention implementation, from its log."""
    with capture_logs() as logs:
        alone = StandaloneRunner(load_runner(settings))
    for entry in logs:
        print(entry)
    return alone, next(entry["by"] for entry in logs if entry["event"] == "attention")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    total, covered_until = 0.0, -inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, covered_until))
        covered_until = max(covered_until, ended)
    return total


def _recording() -> AbstractContextManager[Any]:
    """Record the device's activity; None without a device."""
    if not torch.cuda.is_available():
        return nullcontext()
    return profile(activities=[ProfilerActivity.CUDA])


def _on_device(records: Any) -> Iterator[tuple[float, float]]:
    """Yield start and end of each kernel and copy, in microseconds."""
    events = None if records is None else records.events()
    for event in events or ():
        if event.device_type == DeviceType.CUDA:
            yield event.time_range.start, event.time_range.end


def main() -> None:
    prepare_memory()
    given = job()
    alone, attention = load(WorkerSettings.load([]))
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    serve(
        {
            "warm": lambda: alone.run(warmup),
            "run": lambda: {**alone.run(work), "attention": attention},
            "decode": lambda: [
                {"num_rows": rows, "seq_len": 1024, **alone.decode(rows, 1024)}
                for rows in given["decode_rows"]
            ],
        }
    )


if __name__ == "__main__":
    main()

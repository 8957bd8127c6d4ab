"""The worker's runner in one process with a minimal scheduler: no gRPC, no Redis, no gateway.

Each step is launched before the output of the one before is asked for, as the worker does it.
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

from benchmarks.engines.answers import answer, job
from benchmarks.engines.batcher import Step, steps
from benchmarks.engines.workload import Work
from worker_svc.device_thread import MOST_LAUNCHED
from worker_svc.engine import Engine
from worker_svc.memory import prepare_memory
from worker_svc.plans import StepOutput, plan_from_proto
from worker_svc.settings import WorkerSettings
from worker_svc.step_runner import Launched
from worker_svc.torch_engine import load_engine

_TIMES = ("waiting_ns", "preparing_ns", "forward_ns", "sampling_ns")
_MEASURED_STEPS = 50


class Alone:
    """An engine, and whoever drives it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, work: Work) -> dict[str, object]:
        """All of the work at once. Times are sums over the steps, those of decoding rows alone
        apart."""
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
        self._engine.runner.clear()
        return {"seconds": seconds, "num_tokens": num_tokens, "times": times}

    def decode(
        self, num_rows: int, seq_len: int, num_steps: int = _MEASURED_STEPS
    ) -> dict[str, float | None]:
        """Steps of decoding rows alone: how long one takes, how much of it lies between the work of
        two steps, and how much the device works, by its own records if it keeps any."""
        prompts = [[row % 1000 + 1] * seq_len for row in range(num_rows)]
        # The first rows decode while the last ones' prompts are computed.
        found = self._outputs(self._steps(Work(prompts, [4 * num_steps] * num_rows)))
        for step, _ in found:
            if step.num_scheduled_tokens == num_rows:
                break
        for _ in range(num_steps):
            next(found)
        began_s = time.perf_counter()
        times = [next(found)[1].times for _ in range(num_steps)]
        seconds = time.perf_counter() - began_s
        with _recording() as records:
            for _ in range(num_steps):
                next(found)
        for _ in found:
            pass
        self._engine.runner.clear()
        between_ns = sum(one.waiting_ns + one.preparing_ns for one in times)
        busy_us = covered(_on_device(records))
        return {
            "step_ms": 1000 * seconds / num_steps,
            "between_ms": between_ns / 1e6 / num_steps,
            "busy_ms": busy_us / 1000 / num_steps if busy_us else None,
        }

    def _steps(self, work: Work) -> Iterator[Step]:
        identity = self._engine.identity
        return steps(
            work,
            max_num_seqs=identity.max_num_seqs,
            max_num_batched_tokens=identity.max_num_batched_tokens,
            block_size=identity.block_size,
            num_blocks=identity.num_blocks,
        )

    def _outputs(self, planned: Iterator[Step]) -> Iterator[tuple[Step, StepOutput]]:
        launched: deque[tuple[Step, Launched[StepOutput]]] = deque()
        for step in planned:
            launched.append((step, self._engine.runner.launch(plan_from_proto(step.plan))))
            if len(launched) == MOST_LAUNCHED:
                first, result = launched.popleft()
                yield first, result.output()
        for first, result in launched:
            yield first, result.output()


def load(settings: WorkerSettings) -> tuple[Alone, str]:
    """With who attends, as its log says."""
    with capture_logs() as logs:
        alone = Alone(load_engine(settings))
    for entry in logs:
        print(entry)
    return alone, next(entry["by"] for entry in logs if entry["event"] == "attention")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The time in which at least one of them is under way."""
    total, covered_until = 0.0, -inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, covered_until))
        covered_until = max(covered_until, ended)
    return total


def _recording() -> AbstractContextManager[Any]:
    """Of what the device does; None where there is none."""
    if not torch.cuda.is_available():
        return nullcontext()
    return profile(activities=[ProfilerActivity.CUDA])


def _on_device(records: Any) -> Iterator[tuple[float, float]]:
    """Microseconds from beginning to end of each kernel and copy."""
    events = None if records is None else records.events()
    for event in events or ():
        if event.device_type == DeviceType.CUDA:
            yield event.time_range.start, event.time_range.end


def main() -> None:
    prepare_memory()
    given = job()
    alone, attention = load(WorkerSettings.load([]))
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    answer(
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

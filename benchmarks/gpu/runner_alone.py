"""The worker's runner in one process with a minimal scheduler: no gRPC, no Redis, no gateway.

Each step is launched before the output of the one before is asked for, as the worker does it.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator

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
_PROFILED_STEPS = 50
# More than the steps in which the first rows decode and the last ones' prompts are computed.
_NUM_DECODES = 4 * _PROFILED_STEPS


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

    def decode(self, num_rows: int, seq_len: int) -> dict[str, float]:
        """Steps of decoding rows alone: how long one takes, and how much of that time the device
        works, by its own records."""
        prompts = [[row % 1000 + 1] * seq_len for row in range(num_rows)]
        work = Work(prompts, [_NUM_DECODES] * num_rows)
        found = self._outputs(self._steps(work))
        for step, _ in found:
            if step.num_scheduled_tokens == num_rows:
                break
        self._take(found, _PROFILED_STEPS)
        step_s = self._take(found, _PROFILED_STEPS) / _PROFILED_STEPS
        with profile(activities=[ProfilerActivity.CUDA]) as records:
            self._take(found, _PROFILED_STEPS)
        busy_us = sum(event.self_device_time_total for event in records.key_averages())
        for _ in found:
            pass
        self._engine.runner.clear()
        return {"step_ms": 1000 * step_s, "busy_ms": busy_us / 1000 / _PROFILED_STEPS}

    @staticmethod
    def _take(found: Iterator[tuple[Step, StepOutput]], count: int) -> float:
        """The seconds that so many steps take."""
        began_s = time.perf_counter()
        for _ in range(count):
            next(found)
        return time.perf_counter() - began_s

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


def main() -> None:
    prepare_memory()
    given = job()
    settings = WorkerSettings.load([f"--{key}={value}" for key, value in given["flags"].items()])
    alone = Alone(load_engine(settings))
    warmup, work = Work.of_json(given["warmup"]), Work.of_json(given["work"])
    answer(
        {
            "warm": lambda: alone.run(warmup),
            "run": lambda: alone.run(work),
            "decode": lambda: [
                {"num_rows": rows, "seq_len": 1024, **alone.decode(rows, 1024)}
                for rows in given["decode_rows"]
            ],
        }
    )


if __name__ == "__main__":
    main()

"""`python -m benchmarks.ranks.decoding JOB` decodes on a runner in this process, with the other
ranks beside it, and prints what a step took as JSON."""

import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from quire.internal.v1 import worker_pb2
from quire.service.logs import configure_logging
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.runner.step_runner import LoadedRunner, PendingOutput, StepRunner
from worker_svc.service.process import prepare_process
from worker_svc.settings import WorkerSettings

_PROMPT_LEN: Final = 16
_WARM_UP: Final = 5
_VOCAB_SIZE: Final = 8000


@dataclass(frozen=True)
class Job:
    """Numbers of rows that decode together."""

    model: str
    dtype: str
    num_shards: int
    num_stages: int
    threads: int  # of all ranks together
    num_rows: list[int]  # one measurement each
    num_steps: int


@dataclass
class Calls:
    """Those of one kind, on rank 0."""

    count: int = 0
    num_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, other: "Calls") -> None:
        self.count += other.count
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds

    def clear(self) -> None:
        self.count = self.num_bytes = 0
        self.seconds.clear()


@dataclass(frozen=True)
class Decoding:
    """What steps took, in milliseconds, and the communication of one step."""

    num_rows: int
    step_ms: float
    message_ms: float
    communication_ms: float
    num_calls: float
    num_bytes: float


def main() -> None:
    # The same as in the worker.
    prepare_process()
    # Standard output is for the result.
    configure_logging("worker", "error")
    job = Job(**json.loads(sys.argv[1]))
    group = importlib.import_module("worker_svc.ranks.group").RankGroup
    links = importlib.import_module("worker_svc.ranks.stage_links").StageLinks
    calls = Communication(group, links)
    loading = importlib.import_module("worker_svc.loading.runner_loading")
    loaded = loading.load_runner(_settings(job))
    found = [_measure(job, num_rows, loaded, calls) for num_rows in job.num_rows]
    print(json.dumps([asdict(one) for one in found]), flush=True)
    loaded.close()


def _settings(job: Job) -> WorkerSettings:
    flags = {
        "model": job.model,
        "dtype": job.dtype,
        "device": "cpu",
        "threads": job.threads,
        "tensor-parallel-size": job.num_shards,
        "pipeline-parallel-size": job.num_stages,
        "max-num-seqs": max(job.num_rows),
        "max-num-batched-tokens": max(2048, max(job.num_rows) * _PROMPT_LEN),
        "max-model-len": 1024,
        "weight-cache-size": 0,
        "log-level": "error",
    }
    return WorkerSettings.load([f"--{name}={value}" for name, value in flags.items()])


class Communication:
    """The calls of rank 0: messages, hidden states that it sends to the next stage, and what Gloo
    or shared memory exchange within passes."""

    def __init__(self, group: Any, links: Any) -> None:
        """Counts the calls of these classes."""
        self._by_gloo = [_counted(group, name) for name in ("sum", "gather")]
        self._by_gloo.append(_counted(links, "send_states"))
        self._messages = _counted(group, "broadcast")
        self._groups: list[Any] = []
        connect = group.connect

        def connected(group: Any, *arguments: Any) -> None:
            connect(group, *arguments)
            self._groups.append(group)

        group.connect = connected

    def take(self, num_steps: int) -> dict[str, float]:
        """Of each step since the last call."""
        messages = self._messages.seconds or [0.0]
        found = Calls()
        for one in (*self._by_gloo, self._messages):
            found.add(one)
        for shared in (group.shared for group in self._groups if group.shared is not None):
            # The calls of the group are some of these.
            usage = shared.take_usage()
            found = Calls(usage.num_calls, usage.num_bytes, [usage.seconds])
        taken = {
            "message_ms": 1e3 * statistics.median(messages),
            "communication_ms": 1e3 * sum(found.seconds) / num_steps,
            "num_calls": found.count / num_steps,
            "num_bytes": found.num_bytes / num_steps,
        }
        for one in (*self._by_gloo, self._messages):
            one.clear()
        return taken


def _counted(group: Any, name: str) -> Calls:
    """Count the calls of this method of the class."""
    calls, method = Calls(), getattr(group, name)

    def counted(self: Any, tensor: Any, *more: Any) -> Any:
        given = tensor if isinstance(tensor, list) else [tensor]
        began_s = time.perf_counter()
        result = method(self, tensor, *more)
        calls.count += 1
        calls.num_bytes += sum(one.nbytes for one in given)
        calls.seconds.append(time.perf_counter() - began_s)
        return result

    setattr(group, name, counted)
    return calls


def _measure(job: Job, num_rows: int, loaded: LoadedRunner, calls: Communication) -> Decoding:
    run = _Stepper(job, num_rows, loaded.runner, loaded.identity.block_size)
    for _ in range(_WARM_UP):
        run()
    calls.take(1)
    step_s = [run() for _ in range(job.num_steps)]
    run.end()
    release = worker_pb2.BatchPlan(released_rows=range(num_rows))
    loaded.runner.launch(plan_from_proto(release)).output()
    return Decoding(num_rows, 1e3 * statistics.median(step_s), **calls.take(job.num_steps))


class _Stepper:
    """Decodes a token of all rows per call. With several stages the rows are divided into as many
    plans, which are in flight at the same time."""

    def __init__(self, job: Job, num_rows: int, runner: StepRunner, block_size: int) -> None:
        """Run the prompts."""
        self._runner = runner
        self._step = 0
        rows = range(num_rows)
        parts = [rows[stage :: job.num_stages] for stage in range(job.num_stages)]
        self._parts = [part for part in parts if part]
        width = -(-(_PROMPT_LEN + _WARM_UP + job.num_steps + 2) // block_size)
        draw = random.Random(0)
        self._launched = [
            self._launch(_prompts(part, width, draw), part, _PROMPT_LEN) for part in self._parts
        ]

    def __call__(self) -> float:
        """The seconds that it took."""
        began_s = time.perf_counter()
        for at, rows in enumerate(self._parts):
            self._launched[at].output()
            self._launched[at] = self._launch(worker_pb2.BatchPlan(), rows, 1)
        return time.perf_counter() - began_s

    def end(self) -> None:
        for one in self._launched:
            one.output()

    def _launch(
        self, plan: worker_pb2.BatchPlan, rows: Sequence[int], count: int
    ) -> PendingOutput[StepOutput]:
        self._step += 1
        plan.step = self._step
        plan.schedule.rows.extend(rows)
        plan.schedule.num_scheduled_tokens.extend([count] * len(rows))
        return self._runner.launch(plan_from_proto(plan))


def _prompts(rows: Sequence[int], width: int, draw: random.Random) -> worker_pb2.BatchPlan:
    """Admits the rows, each with `width` blocks."""
    plan = worker_pb2.BatchPlan()
    admissions = plan.admissions
    for row in rows:
        admissions.rows.append(row)
        admissions.token_ids.extend(draw.randrange(_VOCAB_SIZE) for _ in range(_PROMPT_LEN))
        admissions.num_tokens.append(_PROMPT_LEN)
        admissions.num_prompt_tokens.append(_PROMPT_LEN)
        admissions.num_computed_tokens.append(0)
        admissions.block_ids.extend(range(1 + row * width, 1 + (row + 1) * width))
        admissions.num_blocks.append(width)
        for values in (admissions.temperatures, admissions.min_ps):
            values.append(0.0)
        admissions.top_ps.append(1.0)
        for numbers in (admissions.top_ks, admissions.seeds, admissions.num_logprobs):
            numbers.append(0)
        admissions.num_prompt_logprobs.append(0)
    return plan


if __name__ == "__main__":
    main()

"""Sequences with changed logits, run by a minimal scheduler on any runner."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from tiny_models import VOCAB_SIZE
from worker_driver import BLOCK_SIZE, Sampling, admit, schedule
from worker_driver import Sequence as DriverSequence

from quire.internal.v1 import worker_pb2
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.plans import StepOutput, plan_from_proto
from worker_svc.runner.step_runner import PendingOutput, StepRunner

NUM_JOBS, NUM_OUTPUT = 32, 11


@dataclass(eq=False)
class Job:
    """A sequence. Its length is known before its tokens are."""

    prompt: list[int]
    params: LogitsParams | None
    sampling: Sampling
    num_output: int
    output: list[int] = field(default_factory=list)
    row: int = -1
    num_tokens: int = 0
    num_computed: int = 0


@dataclass(frozen=True)
class Schedule:
    """How jobs are run."""

    chunk: int = 1000  # the most tokens of a row in a step
    depth: int = 1  # steps that are launched before the first one's output is read
    preempted_every: int = 0  # steps, after which all rows are released and admitted again
    num_rounds: int = 1  # of steps that only decode


def changed_jobs() -> list[Job]:
    """Each with its own parameters; every fourth has none."""
    draw = Random(7)

    def some(count: int) -> Any:
        return np.array(draw.sample(range(VOCAB_SIZE), count), np.int64)

    made = []
    for index in range(NUM_JOBS):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 9))]
        params = LogitsParams(
            presence_penalty=draw.uniform(-1, 2),
            frequency_penalty=draw.uniform(-1, 2),
            repetition_penalty=draw.uniform(0.7, 1.5),
            min_tokens=draw.randint(0, 12),
            stop_token_ids=some(3),
            bias_token_ids=some(20),
            biases=np.array([draw.uniform(-5, 5) for _ in range(20)], np.float32),
            allowed_token_ids=some(60),
            bad_words=tuple(some(length) for length in (1, 1, 2, 2, 3)),
            typical_p=draw.choice([0.6, 1.0]),
        )
        sampling = Sampling(temperature=draw.choice([0.0, 1.0, 1.5]), top_p=0.9, seed=index)
        made.append(Job(prompt, params if index % 4 else None, sampling, NUM_OUTPUT))
    return made


def run_jobs(runner: StepRunner, jobs: Sequence[Job], how: Schedule) -> list[list[int]]:
    """The tokens of each job. Blocks are those of rows: enough for all tokens of each."""
    room = max(len(job.prompt) + job.num_output for job in jobs)
    waiting: list[tuple[list[tuple[int, Job]], PendingOutput[StepOutput]]] = []
    free, step = list(range(len(jobs))), 0
    pending, running = list(jobs), list[Job]()

    def read_oldest() -> None:
        sampling, launched = waiting.pop(0)
        output, by_row = launched.output(), dict(sampling)
        assert not output.failures
        for row, token in zip(output.sampled_rows, output.sampled_token_ids, strict=True):
            by_row[row].output.append(token)

    while pending or running:
        step += 1
        plan = worker_pb2.BatchPlan(epoch=1, step=step)
        ended = [job for job in running if job.num_tokens == len(job.prompt) + job.num_output]
        preempted = []
        if how.preempted_every and step % how.preempted_every == 0:
            while waiting:
                read_oldest()
            preempted = [job for job in running if job not in ended]
        for job in (*ended, *preempted):
            running.remove(job)
            plan.released_rows.append(job.row)
            free.append(job.row)
        pending += preempted
        for job in pending:
            _admit(plan, job, free.pop(), room)
        running, pending = [*running, *pending], []
        sampling = _schedule(plan, running, how)
        waiting.append((sampling, runner.launch(plan_from_proto(plan))))
        while len(waiting) >= how.depth:
            read_oldest()
    while waiting:
        read_oldest()
    return [job.output for job in jobs]


def _admit(plan: worker_pb2.BatchPlan, job: Job, row: int, room: int) -> None:
    tokens = job.prompt + job.output
    num_blocks = -(-room // BLOCK_SIZE)
    blocks = [1 + row * num_blocks + i for i in range(num_blocks)]
    admit(plan, DriverSequence(row, tokens, len(job.prompt), 0, blocks, job.sampling))
    params = b"" if job.params is None else job.params.to_bytes()
    plan.admissions.logits_params.append(params)
    job.row, job.num_tokens, job.num_computed = row, len(tokens), 0


def _schedule(
    plan: worker_pb2.BatchPlan, running: list[Job], how: Schedule
) -> list[tuple[int, Job]]:
    """The rows that sample, with their jobs."""
    sampling = []
    counts = [min(how.chunk, job.num_tokens - job.num_computed) for job in running]
    decodes = all(count == 1 for count in counts)
    for job, count in zip(running, counts, strict=True):
        schedule(plan, job.row, count)
        job.num_computed += count
        left = len(job.prompt) + job.num_output - job.num_tokens
        rounds = min(how.num_rounds, left) if decodes else 1
        if decodes and how.num_rounds > 1:
            plan.schedule.num_rounds.append(rounds)
        if job.num_computed == job.num_tokens:
            sampling.append((job.row, job))
            job.num_tokens += rounds
            job.num_computed += rounds - 1
    return sampling

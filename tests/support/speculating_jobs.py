"""Sequences of rows with look-ahead, run by a minimal scheduler, and drafters for them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tiny_models import MAX_MODEL_LEN, VOCAB_SIZE
from worker_driver import LOGPROBS_TOLERANCE, Sampling, admit, append, schedule
from worker_driver import Sequence as DriverSequence

from quire.internal.v1 import worker_pb2
from worker_svc.logits.built_in import make_pipeline
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.plans import Plan, StepOutput, plan_from_proto
from worker_svc.plan.tables import RowTables
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.runner.step_runner import LoadedRunner, StepRunner
from worker_svc.speculation.drafter import Drafter

NUM_OUTPUT = 24


@dataclass(eq=False)
class Job:
    prompt: list[int]
    num_output: int
    sampling: Sampling = field(default_factory=Sampling)
    params: LogitsParams | None = None
    without_drafts: bool = False


@dataclass(frozen=True)
class How:
    """How jobs are run."""

    lookahead: int = 0
    chunk: int = 1000  # the most tokens of a prompt in a step
    num_rounds: int = 1
    # Rows have blocks for what is known and one token more; else for all of their tokens.
    is_tight: bool = False


@dataclass(eq=False)
class Written:
    token_ids: list[int] = field(default_factory=list)
    # Of each token: ids, and their log-probabilities.
    logprobs: list[tuple[list[int], list[float]]] = field(default_factory=list)
    has_failed: bool = False


@dataclass
class Run:
    written: list[Written]
    num_steps: int
    num_drafts: int
    num_accepted: int

    @property
    def token_ids(self) -> list[list[int]]:
        return [one.token_ids for one in self.written]


def run_jobs(
    runner: StepRunner, jobs: Sequence[Job], how: How, failing: Collection[int] = ()
) -> Run:
    """All at once. Row i is that of job i; what it writes beyond its end is left out. The rows
    that are `failing` must fail in the end."""
    run = Run([Written() for _ in jobs], 0, 0, 0)
    free = list(range(199, 0, -1))
    rows = [
        DriverSequence(row, job.prompt, len(job.prompt), sampling=job.sampling)
        for row, job in enumerate(jobs)
    ]
    while any(not _has_ended(*each) for each in zip(jobs, run.written, strict=True)):
        plan = worker_pb2.BatchPlan(epoch=1, step=run.num_steps + 1)
        sampling, lookahead = [], []
        decodes = all(each.num_computed_tokens >= len(each.tokens) for each in rows)
        for job, written, row in zip(jobs, run.written, rows, strict=True):
            if not run.num_steps:
                row.blocks_for(_num_blocks_tokens(job, written, how), free)
                admit(plan, row)
                data = b"" if job.params is None else job.params.to_bytes()
                plan.admissions.logits_params.append(data)
                if job.without_drafts:
                    plan.admissions.rows_without_drafts.append(row.row)
            elif _has_ended(job, written):
                continue
            else:
                new = row.blocks_for(_num_blocks_tokens(job, written, how), free)
                append(plan, row.row, new)
            count = min(how.chunk, max(1, len(job.prompt) - row.num_computed_tokens))
            row.num_computed_tokens += count
            schedule(plan, row.row, count)
            samples = row.num_computed_tokens >= len(job.prompt)
            lookahead.append(how.lookahead if samples else 0)
            sampling.append(row.row)
            if decodes and how.num_rounds > 1:
                plan.schedule.num_rounds.append(how.num_rounds)
        if how.lookahead:
            plan.schedule.num_lookahead_tokens[:] = lookahead
        _read(runner.launch(plan_from_proto(plan)).output(), jobs, run)
        run.num_steps += 1
    runner.clear()
    assert {row for row, one in enumerate(run.written) if one.has_failed} == {*failing}
    return run


def _has_ended(job: Job, written: Written) -> bool:
    return written.has_failed or len(written.token_ids) >= job.num_output


def _num_blocks_tokens(job: Job, written: Written, how: How) -> int:
    known = len(job.prompt) + len(written.token_ids)
    # Rounds and drafts may go beyond the end of the output.
    most = min(len(job.prompt) + job.num_output + 16, MAX_MODEL_LEN)
    return known + how.num_rounds if how.is_tight else most


def _read(output: StepOutput, jobs: Sequence[Job], run: Run) -> None:
    for row in output.failures:
        run.written[row].has_failed = True
    run.num_drafts += sum(output.num_draft_tokens)
    run.num_accepted += sum(output.num_accepted_tokens)
    for at, (row, token) in enumerate(
        zip(output.sampled_rows, output.sampled_token_ids, strict=True)
    ):
        written = run.written[row]
        if _has_ended(jobs[row], written):
            continue
        written.token_ids.append(token)
        if output.logprobs is not None and jobs[row].sampling.num_logprobs:
            entries = output.logprobs.part(at, at + 1)
            written.logprobs.append((entries.token_ids.tolist(), entries.logprobs.tolist()))


def mixed_jobs() -> list[Job]:
    """Greedy, sampled, with log-probabilities, with every kind of processor; of mixed lengths."""
    repeated = [5, 17, 99, 3, 42] * 4
    penalties = LogitsParams(
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        min_tokens=9,
        stop_token_ids=np.array([8, 9]),
        bias_token_ids=np.array([4, 17]),
        biases=np.array([3, -2], np.float32),
        bad_words=(np.array([5, 17]), np.array([7])),
    )
    allowed = LogitsParams(allowed_token_ids=np.arange(6), typical_p=0.8)
    return [
        Job(repeated, NUM_OUTPUT),
        Job([61, 7], NUM_OUTPUT, Sampling(temperature=1, seed=3)),
        Job(repeated[:9], 7, Sampling(num_logprobs=4)),
        Job([150], NUM_OUTPUT, Sampling(1, top_k=9, top_p=0.8, min_p=0.01, seed=4)),
        Job(repeated, NUM_OUTPUT, params=penalties),
        Job([3, 42, 8], NUM_OUTPUT, Sampling(0.7, seed=5, num_logprobs=2), penalties),
        Job(repeated[:7], NUM_OUTPUT, Sampling(temperature=0.3, seed=6), allowed),
        Job([1, 2, 1, 2, 1], NUM_OUTPUT, Sampling(0.9, seed=7, num_prompt_logprobs=2), allowed),
    ]


def check_equal(found: Run, expected: Run) -> None:
    assert found.token_ids == expected.token_ids
    for one, other in zip(found.written, expected.written, strict=True):
        assert [ids for ids, _ in one.logprobs] == [ids for ids, _ in other.logprobs]
        for (_, values), (_, wanted) in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(values, wanted, atol=LOGPROBS_TOLERANCE)


class KnownTokens:
    """A drafter that knows what the rows will write, and errs at some positions."""

    def __init__(self, outputs: list[list[int]], most: int, wrong_every: int) -> None:
        """Every `wrong_every`th token of a sequence is another one in its drafts; 0: none is."""
        self.tables: RowTables | None = None
        self._outputs = outputs
        self._most = most
        self._wrong_every = wrong_every

    def begin(self, plan: Plan) -> None:
        """It has no state of rows."""

    def clear(self) -> None:
        """It has no state of rows."""

    def draft(self, plan: Plan, rows: Ints, counts: Ints) -> Ints | None:
        tables = self.tables
        assert tables is not None
        drafts = np.zeros_like(counts)
        room = np.zeros_like(counts)
        if plan.num_lookahead_tokens.any():
            room = tables.draft_room(plan, rows, counts)
        for at, row in enumerate(rows.tolist()):
            length = int(tables.num_tokens[row])
            done = length - int(tables.num_prompt_tokens[row])
            known = self._outputs[row][done : done + min(self._most, int(room[at]))]
            for index, token in enumerate(known, done):
                is_wrong = (
                    self._wrong_every and index % self._wrong_every == row % self._wrong_every
                )
                draft = (token + 1) % VOCAB_SIZE if is_wrong else token
                tables.token_table[row, length + index - done] = draft
            drafts[at] = len(known)
        return drafts if drafts.any() else None

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        assert (num_accepted <= num_drafts).all()


def with_drafter(loaded: LoadedRunner, drafter: Drafter) -> StepRunner:
    """A runner of the same model and pool, with its own rows and this drafter."""
    assert isinstance(loaded.runner, MultiStepRunner)
    of = loaded.runner.runner
    assert isinstance(of, Runner)
    tables = of._tables
    if isinstance(drafter, KnownTokens):
        drafter.tables = tables
    context = ProcessorContext(
        vocab_size=of._model.vocab_size,
        max_num_seqs=tables.max_num_seqs,
        max_model_len=tables.max_model_len,
        device=torch.device("cpu"),
        implementation=of._implementation,
        upload=lambda array: torch.from_numpy(array.copy()),
    )
    processors = make_pipeline(context)
    own = (of._model, of._pool, of._attention, tables, processors, of._implementation)
    return MultiStepRunner(Runner(*own, drafter))

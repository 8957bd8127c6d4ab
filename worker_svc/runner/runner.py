"""Runs plans synchronously: tables, inputs, forward pass, sampling."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.attention import PagedBatch
from kernels.dispatch import Implementation
from worker_svc.cache.kv_pool import KvPool
from worker_svc.logits.pipeline import LogitsPipeline
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import BatchStates, ServedModel
from worker_svc.plan.draft_counts import by_position
from worker_svc.plan.failures import NO_TOKEN, RowFailure
from worker_svc.plan.inputs import Ints, StepInputs
from worker_svc.plan.jumps import Jumps, jump
from worker_svc.plan.plans import Plan, StepOutput, StepTimes
from worker_svc.plan.prompt_logprobs import PromptLogprobs, PromptTargets
from worker_svc.plan.tables import RowTables
from worker_svc.runner.host_arrays import tensors_on
from worker_svc.runner.prompt_slices import prompt_logprobs
from worker_svc.runner.row_sampler import RowSampler
from worker_svc.runner.step_runner import Callback, PendingOutput, ReadyOutput, no_op
from worker_svc.runner.waiting_rows import rows_to_hold
from worker_svc.speculation.draft_lines import DraftLines
from worker_svc.speculation.drafter import Drafter
from worker_svc.speculation.verification import VerifiedTokens, sample_and_verify

_NO_ROWS: Final[Ints] = np.empty(0, np.int64)

# Called with ids, positions and the indices of the tokens whose logits are needed.
BeginLogits = Callable[[Tensor, Tensor, Tensor], Future[Tensor]]


@dataclass(frozen=True)
class BegunStep:
    """A step whose forward pass has begun."""

    plan: Plan
    rows: Ints  # that sample
    lines: DraftLines | None
    # Float32 `[num_sampling, vocab_size]`, or of `lines`; None for a step without tokens.
    logits: Future[Tensor] | None
    prompt: PromptLogprobs | None
    failures: dict[int, RowFailure]
    started_ns: int
    prepared_ns: int

    @property
    def has_logits(self) -> bool:
        return self.logits is None or self.logits.done()


class Runner:
    """One model with its pool and tables. Not thread-safe: one thread runs all steps."""

    def __init__(
        self,
        model: ServedModel,
        pool: KvPool,
        attention: PagedAttention,
        tables: RowTables,
        processors: LogitsPipeline,
        implementation: Implementation,
        drafter: Drafter | None = None,
        begin_logits: BeginLogits | None = None,
    ) -> None:
        """`implementation` is that of the sampler. Without a drafter nothing is speculated.
        `begin_logits` is that of a model of several stages."""
        self._model = model
        self._begin_logits = begin_logits or self._logits_at_once
        self._pool = pool
        self._attention = attention
        self._tables = tables
        self._processors = processors
        self._tensor = tensors_on(model.device)
        self._implementation = implementation
        self._sampler = RowSampler(tables, processors, model.device, implementation)
        self._drafter = drafter
        self._idle_since_ns = time.monotonic_ns()
        self.last_finished_step = 0  # read by other threads

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        """Run one plan to its end. `before_blocking` is called before blocks are moved and before
        the forward pass: both release the interpreter."""
        return ReadyOutput(self.run(plan, before_blocking))

    def run(self, plan: Plan, before_blocking: Callback = no_op) -> StepOutput:
        """Run one plan. An error leaves rows undefined until `clear`; the pool stays usable."""
        return self.end(self.begin(plan, before_blocking))

    @torch.inference_mode()
    def begin(self, plan: Plan, before_blocking: Callback = no_op) -> BegunStep:
        """Apply a plan and begin its forward pass. Before a step has ended, others may begin that
        neither run nor change its rows."""
        started_ns = time.monotonic_ns()
        self._apply(plan, before_blocking)
        rows, counts, failures = self._tables.runnable(plan)
        inputs, lines = self._prepare(plan, rows, counts)
        prepared_ns = time.monotonic_ns()
        logits, prompt = self._forward(inputs, lines, rows, before_blocking)
        if prompt is not None:
            self._fail(dict.fromkeys(prompt.failing_rows, NO_TOKEN), failures)
        sampling = rows[inputs.sampling_mask]
        return BegunStep(plan, sampling, lines, logits, prompt, failures, started_ns, prepared_ns)

    @torch.inference_mode()
    def end(self, begun: BegunStep) -> StepOutput:
        """Wait for the logits, and sample. Steps end in the order in which they began."""
        plan, lines, failures = begun.plan, begun.lines, begun.failures
        logits = None if begun.logits is None else begun.logits.result()
        forwarded_ns = time.monotonic_ns()
        sampled = self._sample(plan, logits, lines, begun.rows, failures)
        jumps = self._jump(plan, sampled)
        ended_ns = time.monotonic_ns()
        idle_since_ns, self._idle_since_ns = self._idle_since_ns, ended_ns
        self.last_finished_step = plan.step
        output = StepOutput(
            sampled_rows=sampled.sampled_rows,
            sampled_token_ids=sampled.sampled_token_ids,
            times=_times(begun, idle_since_ns, forwarded_ns, ended_ns),
            logprobs=sampled.logprobs,
            failures=failures,
            prompt_logprobs=begun.prompt,
            num_draft_tokens=[] if lines is None else by_position(lines.num_drafts),
            num_accepted_tokens=by_position(sampled.num_accepted),
        )
        return jumps.add_to(output, plan, self._tables)

    def clear(self) -> None:
        """Release all rows; blocks keep their contents."""
        if self._drafter is not None:
            self._drafter.clear()
        self._tables.clear()
        self._processors.clear()

    def _apply(self, plan: Plan, before_blocking: Callback) -> None:
        if self._drafter is not None:
            self._drafter.begin(plan)
        self._tables.apply(plan)
        if plan.admissions:
            self._sampler.rows_have_changed()
        for row, failure in self._processors.change_rows(plan).items():
            self._tables.fail(row, failure)
        if plan.moves_blocks:
            before_blocking()
            self._pool.move(plan.swap_outs, plan.swap_ins, plan.copies)

    def _prepare(
        self, plan: Plan, rows: Ints, counts: Ints
    ) -> tuple[StepInputs, DraftLines | None]:
        """The inputs, with drafts if any row has them, and where the logits of drafts are."""
        drafts = None if self._drafter is None else self._drafter.draft(plan, rows, counts)
        if drafts is None:
            return self._tables.prepare(rows, counts), None
        inputs = self._tables.prepare(rows, counts + drafts, drafts)
        return inputs, DraftLines.of(inputs.logits_indices, drafts[inputs.sampling_mask])

    def _forward(
        self, inputs: StepInputs, lines: DraftLines | None, rows: Ints, before_blocking: Callback
    ) -> tuple[Future[Tensor] | None, PromptLogprobs | None]:
        """Logits of the rows that sample, float32 `[num_sampling, vocab_size]`, or of `lines`, and
        the log-probabilities of prompt tokens, where rows request them. For these it waits."""
        if not inputs.num_tokens:
            return None, None
        batch = PagedBatch(
            block_table=self._tensor(self._tables.block_tables(rows, inputs.seq_lens)),
            query_start_loc=self._tensor(inputs.query_start_loc),
            seq_lens=self._tensor(inputs.seq_lens),
            block_size=self._pool.block_size,
        )
        self._pool.wait_for_swap_outs(inputs.slot_mapping)
        self._attention.set_batch(batch, self._tensor(inputs.slot_mapping))
        ids, positions, indices = (
            self._tensor(array)
            for array in (
                inputs.input_ids,
                inputs.positions,
                inputs.logits_indices if lines is None else lines.token_indices,
            )
        )
        targets = self._tables.prompt_targets(rows, inputs)
        before_blocking()
        prompt = None
        if targets is None:
            logits = self._begin_logits(ids, positions, indices)
        else:
            final = self._model.final_states(ids, positions)
            prompt = self._prompt_logprobs(final, targets)
            logits = _known(final.logits(indices))
        self._tables.advance(rows, inputs.seq_lens)
        if lines is not None:
            self._tables.hold_back(rows[inputs.sampling_mask], lines.num_drafts)
        return logits, prompt

    def _logits_at_once(self, ids: Tensor, positions: Tensor, indices: Tensor) -> Future[Tensor]:
        return _known(self._model.logits(ids, positions, indices))

    def _prompt_logprobs(self, final: BatchStates, targets: PromptTargets) -> PromptLogprobs:
        entries = prompt_logprobs(
            final,
            self._tensor(targets.logits_indices),
            self._tensor(targets.token_ids),
            targets.num_top,
            self._model.vocab_size,
            self._implementation,
        )
        arrays = (entries.token_ids, entries.logprobs, entries.ranks)
        return PromptLogprobs.pack(targets, *(tensor.cpu().numpy() for tensor in arrays))

    def _sample(
        self,
        plan: Plan,
        logits: Tensor | None,
        lines: DraftLines | None,
        rows: Ints,
        failures: dict[int, RowFailure],
    ) -> VerifiedTokens:
        """Sample, and add failing rows to `failures`. Rows that have to wait are left out."""
        if logits is not None and (held := rows_to_hold(plan, rows, self._processors.unready)):
            is_held = np.isin(rows, held)
            self._tables.hold_back(rows[is_held])
            kept = (~is_held).nonzero()[0]
            rows = rows[kept]
            if lines is None:
                logits = logits[self._tensor(kept)]
            else:
                lines = lines.of_rows(kept)
        if logits is None or not len(rows):
            return VerifiedTokens([])
        if lines is None:
            sampled = self._sampler.sample(logits, rows, failures)
            self._fail(sampled.failures, failures)
            return VerifiedTokens([sampled])
        verified = sample_and_verify(self._sampler, self._tables, logits, lines, rows, failures)
        assert self._drafter is not None
        self._drafter.observe(rows, lines.num_drafts, verified.num_accepted)
        return verified

    def _jump(self, plan: Plan, sampled: VerifiedTokens) -> Jumps:
        """Append forced tokens, and begin what can be done before the next step."""
        rows = sampled.parts[0].rows if sampled.parts else _NO_ROWS
        processors = self._processors
        forced = processors.forced_rows(rows)
        jumps = jump(plan, self._tables, forced, processors.forced_tokens, sampled.num_gained)
        processors.begin_apply(rows)
        return jumps

    def _fail(self, new: dict[int, RowFailure], failures: dict[int, RowFailure]) -> None:
        """Add failures to `failures` that no row has yet."""
        for row, failure in new.items():
            if row not in failures:
                self._tables.fail(row, failure)
                failures[row] = failure


def _known(logits: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(logits)
    return future


def _times(begun: BegunStep, idle_since_ns: int, forwarded_ns: int, ended_ns: int) -> StepTimes:
    """`idle_since_ns` is the end of the step before; if this one began earlier, its pass counts
    from there on."""
    return StepTimes(
        waiting_ns=max(0, begun.started_ns - idle_since_ns),
        preparing_ns=begun.prepared_ns - begun.started_ns,
        forward_ns=max(0, forwarded_ns - max(begun.prepared_ns, idle_since_ns)),
        sampling_ns=ended_ns - forwarded_ns,
        starting_ns=max(0, begun.started_ns - max(idle_since_ns, begun.plan.arrived_ns)),
    )

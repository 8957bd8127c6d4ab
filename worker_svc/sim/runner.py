"""Runs plans without a model."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from worker_svc.plan.draft_counts import by_position
from worker_svc.plan.failures import NO_TOKEN, RowFailure
from worker_svc.plan.inputs import Ints, StepInputs
from worker_svc.plan.jumps import jump, lookahead_rows
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.plans import Plan, PlanError, StepOutput
from worker_svc.plan.prompt_logprobs import PromptLogprobs, PromptTargets
from worker_svc.plan.tables import RowTables
from worker_svc.runner.step_runner import Callback, Identity, PendingOutput, ReadyOutput, no_op
from worker_svc.sim.device_clock import DeviceClock
from worker_svc.sim.drafter import Drafts, SimDrafter
from worker_svc.sim.kv_checker import KvChecker
from worker_svc.sim.recorded_tokens import RecordedStep, RecordedSteps
from worker_svc.sim.sampling import Words, logprobs_at, tokens_at

# A shell's exit status after SIGKILL. The signal itself would not do: the first process of a
# container cannot send it to itself.
_KILLED = 137


@dataclass(frozen=True, kw_only=True)
class SimModel:
    """The geometry of a worker, and a linear model of a step's duration."""

    vocab_size: int = 32000
    max_model_len: int = 4096
    block_size: int = 16
    num_blocks: int = 4096  # the null block included
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    step_ms: float = 0.0  # of every forward pass
    token_us: float = 0.0  # more for each scheduled token
    context_ns: float = 0.0  # more for each token attended to
    longest_jump: int = 0  # of rows with look-ahead: after token t they jump by t % (this + 1)
    num_speculative_tokens: int = 0
    acceptance_rate: float = 0.0  # the share of drafts that are right

    @property
    def identity(self) -> Identity:
        """Workers of equal vocabulary and length have one fingerprint, whatever their pools."""
        fingerprint = f"sim vocab_size={self.vocab_size} max_model_len={self.max_model_len}"
        return Identity(
            model_fingerprint=fingerprint.encode(),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            kv_cache_dtype="sim",
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    def step_ns(self, inputs: StepInputs) -> int:
        """Duration of a whole step; 0 without a scheduled token."""
        if not inputs.num_tokens:
            return 0
        context = self.context_ns * float(inputs.seq_lens.sum())
        return int(self.step_ms * 1e6 + self.token_us * 1e3 * inputs.num_tokens + context)


class Poison:
    """Ends the process when a row runs whose prompt contains a certain token."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self._rows: set[int] = set()

    def check(self, plan: Plan) -> None:
        """To be called for every plan, in order. Does not return if a poisoned row runs."""
        self._rows.difference_update(plan.released_rows.tolist())
        for admission in plan.admissions:
            if self._token_id in admission.token_ids[: admission.num_prompt_tokens]:
                self._rows.add(admission.row)
        if not self._rows.isdisjoint(plan.rows.tolist()):
            os._exit(_KILLED)

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()


class _Sampled(NamedTuple):
    """A token of each row."""

    rows: Ints
    token_ids: Ints
    logprobs: Logprobs | None


class SimRunner:
    """One simulated worker: tables, a KV checker, and a clock. One thread runs all steps, which
    wait while `gate` is cleared."""

    def __init__(
        self,
        model: SimModel,
        recorded: RecordedSteps | None = None,
        poison: Poison | None = None,
    ) -> None:
        """In `recorded` steps rows sample or fail as recorded; in all others by `tokens_at`."""
        self.model = model
        self._recorded = recorded or {}
        self._poison = poison
        self.gate = threading.Event()
        self.gate.set()
        self._tables = RowTables(
            max_num_seqs=model.max_num_seqs,
            max_model_len=model.max_model_len,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
            max_num_batched_tokens=model.max_num_batched_tokens,
        )
        self.kv_checker = KvChecker(
            self._tables, model.num_blocks, model.num_host_blocks, model.block_size
        )
        self._drafter = SimDrafter(
            self._tables,
            self.kv_checker,
            model.num_speculative_tokens,
            model.acceptance_rate,
            model.vocab_size,
        )
        self._clock = DeviceClock()
        self.last_finished_step = 0  # read by other threads

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        """Run one plan to its end."""
        return ReadyOutput(self.run(plan, before_blocking))

    def run(self, plan: Plan, before_blocking: Callback = no_op) -> StepOutput:
        """Run one plan, for at least the model's duration. Violation if it breaks a rule; rows are
        then undefined until `clear`."""
        if not self.gate.is_set():
            before_blocking()
            self.gate.wait()
            self._clock.resume()
        try:
            return self._run(plan, before_blocking)
        except PlanError as error:
            raise self.kv_checker.record(plan.step, error) from error

    def clear(self) -> None:
        """Release all rows; blocks keep their contents."""
        self._tables.clear()
        self.kv_checker.clear()
        if self._poison is not None:
            self._poison.clear()

    def _run(self, plan: Plan, before_blocking: Callback) -> StepOutput:
        started_ns = time.monotonic_ns()
        self.kv_checker.apply(plan)
        rows, counts, failures = self._tables.runnable(plan)
        drafts = self._drafter.draft(plan, rows, counts)
        num_drafts = np.zeros_like(counts) if drafts is None else drafts.counts
        inputs = self._tables.prepare(rows, counts + num_drafts, num_drafts)
        if self._poison is not None:
            self._poison.check(plan)
        self.kv_checker.write(plan, rows, inputs)
        self._tables.advance(rows, inputs.seq_lens - num_drafts)
        targets = self._tables.prompt_targets(rows, inputs)
        sampled = self._sample(plan, rows, inputs, failures)
        parts = [sampled, *([] if drafts is None else self._accepted(drafts, sampled))]
        gained = Counter(row for part in parts[1:] for row in part.rows.tolist())
        forced_tokens = partial(self._forced_tokens, plan)
        jumps = jump(plan, self._tables, sampled.rows, forced_tokens, gained)
        before_blocking()
        times = self._clock.run(plan.arrived_ns, started_ns, self.model.step_ns(inputs))
        self.last_finished_step = plan.step
        return jumps.add_to(
            StepOutput(
                sampled_rows=np.concatenate([part.rows for part in parts]).tolist(),
                sampled_token_ids=np.concatenate([part.token_ids for part in parts]).tolist(),
                times=times,
                logprobs=Logprobs.join(
                    [len(part.rows) for part in parts], [part.logprobs for part in parts]
                ),
                failures=failures,
                prompt_logprobs=self._prompt_logprobs(plan, targets),
                num_draft_tokens=by_position(num_drafts),
                # Each gives a token behind it.
                num_accepted_tokens=by_position(np.array([*gained.values()], np.int64)),
            ),
            plan,
            self._tables,
        )

    def _sample(
        self, plan: Plan, rows: Ints, inputs: StepInputs, failures: dict[int, RowFailure]
    ) -> _Sampled:
        """Sample, add failing rows to `failures`, and write the tokens into the table."""
        tables = self._tables
        recorded = self._recorded_round(plan)
        sampling = rows[inputs.sampling_mask]
        if held := self._held_rows(plan, sampling, recorded):
            is_held = np.isin(sampling, held)
            # Their last tokens are computed again.
            tables.hold_back(sampling[is_held])
            sampling = sampling[~is_held]
        if failing := self._failing_rows(sampling, recorded):
            for row in failing:
                tables.fail(row, NO_TOKEN)
                failures[row] = NO_TOKEN
            sampling = sampling[~np.isin(sampling, failing)]
        if recorded is None:
            tokens = self._tokens(sampling)
            logprobs = self._logprobs(sampling, tokens)
        else:
            tokens = np.array([recorded.token_ids[row] for row in sampling.tolist()], np.int64)
            logprobs = recorded.logprobs
        self.kv_checker.extend(sampling, tokens)
        tables.write_sampled(sampling, tokens)
        return _Sampled(sampling, tokens, logprobs)

    def _accepted(self, drafts: Drafts, sampled: _Sampled) -> Iterator[_Sampled]:
        """The tokens behind drafts that are what was sampled before them."""
        for depth in count():
            rows = drafts.right_rows(depth, sampled.rows, sampled.token_ids)
            if not len(rows):
                return
            self._tables.accept_draft(rows)
            tokens = self._tokens(rows)
            sampled = _Sampled(rows, tokens, self._logprobs(rows, tokens))
            self.kv_checker.extend(rows, tokens)
            self._tables.write_sampled(rows, tokens)
            yield sampled

    def _tokens(self, rows: Ints) -> Ints:
        seeds, positions = self._tables.seeds[rows], self._tables.num_tokens[rows]
        return tokens_at(seeds, positions, self.model.vocab_size)

    def _forced_tokens(self, plan: Plan, row: int, most: int) -> Iterator[int]:
        """Those of a row's jump, one after another: as recorded, or as many as the sampled token
        says."""
        recorded, rows = self._recorded_round(plan), np.array([row])
        if recorded is not None:
            count = len(recorded.jumps.get(row, ()))
        else:
            last = int(self._tables.token_table[row, self._tables.num_tokens[row] - 1])
            count = min(most, last % (self.model.longest_jump + 1))
        for at in range(count):
            token = self._tokens(rows) if recorded is None else np.array([recorded.jumps[row][at]])
            self.kv_checker.extend(rows, token)
            yield int(token[0])

    def _recorded_round(self, plan: Plan) -> RecordedStep | None:
        """The recorded round; None if the step was not recorded."""
        rounds = self._recorded.get(plan.step)
        if rounds is None:
            return None
        return rounds[plan.round] if plan.round < len(rounds) else RecordedStep({})

    def _held_rows(self, plan: Plan, rows: Ints, recorded: RecordedStep | None) -> list[int]:
        """The rows that may not sample yet, because their grammars are being compiled."""
        if recorded is None:
            return []
        ended = recorded.token_ids.keys() | recorded.failed
        return [row for row in lookahead_rows(plan) if row not in ended]

    def _failing_rows(self, rows: Ints, recorded: RecordedStep | None) -> list[int]:
        """Those of the rows that fail when they sample."""
        if recorded is None:
            return []
        return [row for row in rows.tolist() if row not in recorded.token_ids]

    def _logprobs(self, rows: Ints, tokens: Ints) -> Logprobs | None:
        """None if no row requests any."""
        num_logprobs = self._tables.num_logprobs[rows]
        has_logprobs = num_logprobs > 0
        if not has_logprobs.any():
            return None
        asked = rows[has_logprobs]
        seeds, positions = self._logprob_seeds(asked), self._tables.num_tokens[asked]
        num_top = int(num_logprobs.max()) - 1
        vocab_size = self.model.vocab_size
        return Logprobs.pack(
            num_logprobs, *logprobs_at(seeds, positions, tokens[has_logprobs], num_top, vocab_size)
        )

    def _logprob_seeds(self, rows: Ints) -> Words:
        return self._tables.seeds[rows]

    def _prompt_logprobs(self, plan: Plan, targets: PromptTargets | None) -> PromptLogprobs | None:
        recorded = self._recorded_round(plan)
        if recorded is not None or targets is None:
            return None if recorded is None else recorded.prompt_logprobs
        seeds = np.repeat(self._tables.seeds[targets.rows], targets.num_tokens)
        ends = targets.num_tokens.cumsum()
        within = np.arange(ends[-1]) - np.repeat(ends - targets.num_tokens, targets.num_tokens)
        positions = np.repeat(targets.first_indices, targets.num_tokens) + within
        vocab_size = self.model.vocab_size
        return PromptLogprobs.pack(
            targets, *logprobs_at(seeds, positions, targets.token_ids, targets.num_top, vocab_size)
        )

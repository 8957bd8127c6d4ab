"""Runs plans without a model."""

import threading
import time
from collections.abc import Callable

import numpy as np

from worker_svc.inputs import Ints, StepInputs
from worker_svc.logprobs import Logprobs
from worker_svc.plans import NO_TOKEN_POSSIBLE, Plan, PlanError, StepOutput, StepTimes
from worker_svc.sim.ledger import Ledger
from worker_svc.sim.logprobs import logprobs_at
from worker_svc.sim.model import SimModel
from worker_svc.sim.poison import Poison
from worker_svc.sim.recorded_tokens import RecordedStep, RecordedSteps
from worker_svc.sim.tokens import tokens_at
from worker_svc.step_runner import Finished, Launched, nothing
from worker_svc.tables import Tables

# What a sleep takes longer than asked, mostly; so long the clock is watched instead.
_LONGEST_OVERSLEEP_NS = 150_000


class SimRunner:
    """One simulated worker: tables, a ledger, and a clock. One thread runs all steps.

    For tests: `gate` holds steps back while it is cleared, rows whose seed is in `failing_seeds`
    fail when they sample, and the ledger's `violations` may be read.
    """

    def __init__(
        self,
        model: SimModel,
        recorded: RecordedSteps | None = None,
        poison: Poison | None = None,
    ) -> None:
        """In steps that are `recorded` rows sample, or fail, as they did; else `tokens_at` says."""
        self.model = model
        self._recorded = recorded or {}
        self._poison = poison
        self.gate = threading.Event()
        self.gate.set()
        self.failing_seeds: set[int] = set()
        self._tables = Tables(
            max_num_seqs=model.max_num_seqs,
            max_model_len=model.max_model_len,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
            max_num_batched_tokens=model.max_num_batched_tokens,
        )
        self.ledger = Ledger(
            self._tables, model.num_blocks, model.num_host_blocks, model.block_size
        )
        self._idle_since_ns = time.monotonic_ns()
        self.last_finished_step = 0  # read by other threads

    def launch(self, plan: Plan, meanwhile: Callable[[], object] = nothing) -> Launched[StepOutput]:
        """Runs one plan to its end."""
        meanwhile()
        return Finished(self.run(plan))

    def run(self, plan: Plan) -> StepOutput:
        """Runs one plan, in no less time than the model says. Violation if it breaks a rule; rows
        are then undefined until `clear`."""
        self.gate.wait()
        try:
            return self._run(plan)
        except PlanError as error:
            raise self.ledger.noted(plan.step, error) from error

    def clear(self) -> None:
        """Drops all rows; blocks keep their contents."""
        self._tables.clear()
        self.ledger.clear()
        if self._poison is not None:
            self._poison.clear()

    def _run(self, plan: Plan) -> StepOutput:
        started_ns = time.monotonic_ns()
        idle_since_ns = self._idle_since_ns
        self.ledger.apply(plan)
        rows, counts, failures = self._tables.without_failed(plan)
        inputs = self._tables.prepare(rows, counts)
        prepared_ns = time.monotonic_ns()
        if self._poison is not None:
            self._poison.take(plan)
        self.ledger.write(plan, rows, inputs)
        self._tables.advance(rows, inputs.seq_lens)
        sampled = self._sample(plan, rows, inputs, failures)
        _sleep_until(started_ns + self.model.step_ns(inputs))
        ended_ns = time.monotonic_ns()
        self._idle_since_ns = ended_ns
        self.last_finished_step = plan.step
        return StepOutput(
            sampled_rows=sampled[0],
            sampled_token_ids=sampled[1],
            # Sampling is within the step's time and has none of its own.
            times=StepTimes(
                waiting_ns=started_ns - idle_since_ns,
                preparing_ns=prepared_ns - started_ns,
                forward_ns=ended_ns - prepared_ns,
                sampling_ns=0,
                starting_ns=started_ns - max(idle_since_ns, plan.arrived_ns),
            ),
            logprobs=sampled[2],
            failures=failures,
        )

    def _sample(
        self, plan: Plan, rows: Ints, inputs: StepInputs, failures: dict[int, str]
    ) -> tuple[list[int], list[int], Logprobs | None]:
        """Samples, notes failing rows in `failures`, and writes the tokens into the table."""
        tables = self._tables
        recorded = self._recorded_round(plan)
        sampling = self._healthy(rows[inputs.sampling], recorded, failures)
        if recorded is None:
            seeds, positions = tables.seeds[sampling], tables.num_tokens[sampling]
            tokens = tokens_at(seeds, positions, self.model.vocab_size)
            logprobs = self._logprobs(sampling, tokens)
        else:
            tokens = np.array([recorded.token_ids[row] for row in sampling.tolist()], np.int64)
            logprobs = recorded.logprobs
        self.ledger.extend(sampling, tokens)
        tables.write_sampled(sampling, tokens)
        return sampling.tolist(), tokens.tolist(), logprobs

    def _recorded_round(self, plan: Plan) -> RecordedStep | None:
        """None where nothing is recorded of the step."""
        rounds = self._recorded.get(plan.step)
        if rounds is None:
            return None
        return rounds[plan.round] if plan.round < len(rounds) else RecordedStep({})

    def _healthy(self, rows: Ints, recorded: RecordedStep | None, failures: dict[int, str]) -> Ints:
        """The rows that do not fail now; the others are noted."""
        if recorded is not None:
            failing = [row for row in rows.tolist() if row not in recorded.token_ids]
        elif self.failing_seeds:
            seeds = self._tables.seeds[rows].tolist()
            pairs = zip(rows.tolist(), seeds, strict=True)
            failing = [row for row, seed in pairs if seed in self.failing_seeds]
        else:
            return rows
        for row in failing:
            self._tables.fail(row, NO_TOKEN_POSSIBLE)
            failures[row] = NO_TOKEN_POSSIBLE
        return rows[~np.isin(rows, failing)]

    def _logprobs(self, rows: Ints, tokens: Ints) -> Logprobs | None:
        """None if no row asked."""
        wanted = self._tables.num_logprobs[rows]
        asking = wanted > 0
        if not asking.any():
            return None
        asked = rows[asking]
        seeds, positions = self._tables.seeds[asked], self._tables.num_tokens[asked]
        num_top = int(wanted.max()) - 1
        vocab_size = self.model.vocab_size
        return Logprobs.pack(
            wanted, *logprobs_at(seeds, positions, tokens[asking], num_top, vocab_size)
        )


def _sleep_until(deadline_ns: int) -> None:
    """Sleeps are as long as asked and some; a step's time is to be exact."""
    left_ns = deadline_ns - time.monotonic_ns() - _LONGEST_OVERSLEEP_NS
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    while time.monotonic_ns() < deadline_ns:
        pass

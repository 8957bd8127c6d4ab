"""Applies the result of a plan to its sequences."""

import time
from collections.abc import Callable

import structlog
from grpc import StatusCode

from quire.internal.v1 import worker_pb2
from quire.service.errors import RequestError
from scheduler_svc.core.beams import take_result
from scheduler_svc.core.logprobs import ENTRY_BYTES
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import LaneStats, StepTiming
from scheduler_svc.lane.batch_window import BatchWindow
from scheduler_svc.lane.in_flight import CompletedStep, InFlightStep, InFlightSteps
from scheduler_svc.lane.multi_step import MultiStep
from scheduler_svc.lane.prompt_share import PromptShare
from scheduler_svc.lane.quarantine import Quarantine
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.lane.worker_stream import LaneLost

log = structlog.get_logger()


class StepAccounts:
    """Records completed steps in the parts of a lane and in its counters."""

    def __init__(
        self,
        incarnation: int,
        table: SequenceTable,
        quarantine: Quarantine,
        batch_window: BatchWindow,
        multi_step: MultiStep,
        prompt_share: PromptShare,
        stats: LaneStats,
        step_completed: Callable[[StepTiming], None],
    ) -> None:
        self._incarnation = incarnation
        self._table = table
        self._quarantine = quarantine
        self._batch_window = batch_window
        self._multi_step = multi_step
        self._prompt_share = prompt_share
        self._stats = stats
        self._step_completed = step_completed

    def begin(self, in_flight: InFlightStep, sampled: list[Sequence]) -> None:
        """Before the tokens are appended. `sampled`: a sequence per token."""
        self._table.completed_step = in_flight.step
        self._batch_window.completed(in_flight.step)
        self._quarantine.completed(sampled)

    def end(
        self,
        in_flight: InFlightStep,
        sampled: list[Sequence],
        result: worker_pb2.StepResult,
        started: float,
    ) -> None:
        """After the result is applied. `started`: when it was taken, of time.perf_counter."""
        stats, times = self._stats, result.times
        busy_ns = times.preparing_ns + times.forward_ns + times.sampling_ns
        # A plan without rows, or with failed ones only, has no meaningful duration.
        if sampled:
            round_s = busy_ns / in_flight.num_rounds / 1e9
            self._multi_step.completed(round_s)
            if in_flight.num_tokens == len(in_flight.scheduled.sampling):
                self._batch_window.decoded(round_s)
                self._prompt_share.decoded(round_s)
        if num_prefill_tokens := in_flight.num_prefill_tokens:
            decodes = num_prefill_tokens < in_flight.num_tokens
            self._prompt_share.prefilled(num_prefill_tokens, decodes, busy_ns / 1e9)
        stats.num_sampled_tokens += len(sampled)
        stats.num_forced_tokens += len(result.forced_indices)
        if result.num_draft_tokens:
            stats.draft_tokens.update(dict(enumerate(result.num_draft_tokens)))
            stats.accepted_tokens.update(dict(enumerate(result.num_accepted_tokens)))
        stats.worker_idle_ns += times.waiting_ns
        stats.worker_busy_ns += busy_ns
        stats.worker_starting_ns += times.starting_ns
        stats.scheduling_s += time.perf_counter() - started
        self._step_completed(in_flight.timing(self._incarnation, started))


def fail(sequence: Sequence, error: RequestError) -> None:
    """End the request of a failed row with its error."""
    if sequence.group.error is None:
        report = log.error if error.code is StatusCode.INTERNAL else log.info
        report("row failed", reason=error.message, **sequence.group.record.log_fields)
    sequence.group.fail(error)


def append_tokens(completed: CompletedStep) -> list[Sequence]:
    """Append the tokens to their sequences, and end those that are complete. Return the sequences
    that have gained tokens; one may be listed several times."""
    for sequence, first, packed in completed.prompt_logprobs:
        _add_prompt_logprobs(sequence, first, packed)
    changed = []
    all_logprobs = iter(completed.logprobs)
    for sequence, token_id in zip(completed.sequences, completed.token_ids, strict=True):
        logprobs = next(all_logprobs, b"")
        # Tokens sampled after an end are dropped.
        if sequence.end is None and sequence.group.error is None:
            if sequence.group.beams is not None:
                if take_result(sequence, completed.in_flight.step, logprobs):
                    changed.append(sequence.group.sequences[0])
                continue
            token_ids = sequence.token_ids
            if len(token_ids) == sequence.num_prompt_tokens:
                _require_prompt_logprobs(sequence)
            token_ids.append(token_id)
            if logprobs:
                sequence.logprobs += logprobs
            changed.append(sequence)
            if len(token_ids) >= sequence.max_num_tokens or token_id in sequence.stop_token_ids:
                sequence.end_at_last_token()
    return changed


def correct_counts(completed: CompletedStep, in_flight: InFlightSteps) -> None:
    """Replace what was expected of sequences with look-ahead; `in_flight` are the plans after the
    completed one."""
    if completed.num_computed_tokens:
        num_pending = in_flight.num_pending
        for sequence, num_computed_tokens in completed.num_computed_tokens:
            _correct(sequence, num_computed_tokens, num_pending[sequence])


def _correct(sequence: Sequence, num_computed_tokens: int, num_pending: int) -> None:
    """Replace the counts of a sequence with look-ahead by those of a result. In-flight steps sample
    `num_pending` tokens of it, or more by jumps."""
    if sequence.is_ended:
        return
    sequence.num_tokens = len(sequence.token_ids) + num_pending
    # Without blocks it has been released, and starts anew.
    if sequence.block_ids:
        sequence.num_certain_tokens = num_computed_tokens
        # The next step computes what jumps have added, as far as its blocks have room.
        sequence.num_computed_tokens = sequence.num_tokens - 1


def _add_prompt_logprobs(sequence: Sequence, first: int, packed: bytes) -> None:
    """Add those of the prompt's tokens from the index `first` on; what is known is kept."""
    width = sequence.group.params.num_prompt_logprobs * ENTRY_BYTES
    num_known = len(sequence.prompt_logprobs) - (first - 1) * width
    most = (sequence.num_prompt_tokens - first) * width
    if not (first > 0 and num_known >= 0 and len(packed) <= most):
        raise LaneLost(
            f"the worker sent log-probabilities of prompt tokens from {first} on, {num_known}"
        )
    sequence.prompt_logprobs += packed[num_known:]


def _require_prompt_logprobs(sequence: Sequence) -> None:
    """To be called before the first token, with which they are journaled."""
    if sequence.num_wanted_prompt_logprobs:
        raise LaneLost("the worker sent a token before all log-probabilities of its prompt")

"""Applies the result of a plan to its sequences."""

from scheduler_svc.core.beams import take_result
from scheduler_svc.core.logprobs import ENTRY_BYTES
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.in_flight import CompletedStep, InFlightSteps
from scheduler_svc.lane.worker_stream import LaneLost


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

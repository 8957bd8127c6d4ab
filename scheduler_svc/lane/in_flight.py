"""FIFO of plans sent to the worker and not yet completed."""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul

from grpc import StatusCode

from quire.internal.v1 import worker_pb2
from quire.service.errors import RequestError, failed, invalid
from scheduler_svc.core.logprobs import ENTRY_BYTES, pack_logprobs
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import StepTiming
from scheduler_svc.lane.worker_stream import LaneLost


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Rows and sequences of a plan, in parallel: all that it runs, and those that sample."""

    rows: list[int]
    sequences: list[Sequence]
    # One entry per token to sample.
    sampling_rows: list[int]
    sampling: list[Sequence]
    # Per row; empty if no row has any.
    num_lookahead_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """One plan. Its result belongs to the sequences scheduled then, even if their rows have been
    reused since."""

    epoch: int
    step: int
    scheduled: ScheduledRows
    num_tokens: int
    num_prefill_tokens: int
    num_rounds: int
    sent_at: float  # of time.perf_counter
    # Cost of the step before it was sent.
    scheduling_s: float
    redis_s: float

    def timing(self, worker_incarnation: int, completed_at: float) -> StepTiming:
        """Durations of the step; `completed_at` is of time.perf_counter."""
        return StepTiming(
            worker_incarnation=worker_incarnation,
            scheduling_s=self.scheduling_s,
            redis_s=self.redis_s,
            step_s=completed_at - self.sent_at,
            num_scheduled_tokens=self.num_tokens,
        )


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """Result of a plan: sampled tokens beside their sequences, and sequences whose rows failed."""

    in_flight: InFlightStep
    sequences: list[Sequence]
    token_ids: list[int]
    # Packed, a string per token; no strings at all if no sequence requests any.
    logprobs: list[bytes] = field(default_factory=list)
    failures: list[tuple[Sequence, RequestError]] = field(default_factory=list)
    # Of prompts: the index of the first token, and packed strings.
    prompt_logprobs: list[tuple[Sequence, int, bytes]] = field(default_factory=list)
    # Of sequences with look-ahead: their computed tokens.
    num_computed_tokens: list[tuple[Sequence, int]] = field(default_factory=list)


class InFlightSteps:
    """Plans complete in the order in which they were sent."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_rounds(self) -> int:
        return sum(step.num_rounds for step in self._steps)

    @property
    def oldest_sent_at(self) -> float | None:
        """When the oldest plan was sent, of time.perf_counter."""
        return self._steps[0].sent_at if self._steps else None

    @property
    def sequences(self) -> set[Sequence]:
        """Sequences that are in flight."""
        return {sequence for step in self._steps for sequence in step.scheduled.sequences}

    @property
    def num_pending(self) -> Counter[Sequence]:
        """Tokens that the plans in flight sample of each sequence, jumps not counted."""
        return Counter(sequence for step in self._steps for sequence in step.scheduled.sampling)

    @property
    def oldest(self) -> InFlightStep | None:
        return self._steps[0] if self._steps else None

    def take_oldest(self) -> InFlightStep:
        """Remove the oldest plan, whose result was checked."""
        return self._steps.popleft()

    def run_only(self, sequences: list[Sequence]) -> bool:
        """Whether each plan decodes exactly these sequences, one token each."""
        return all(
            step.num_rounds == 1
            and step.num_tokens == len(sequences)
            and step.scheduled.sequences == sequences
            and step.scheduled.sampling == sequences
            and not step.scheduled.num_lookahead_tokens
            for step in self._steps
        )

    def add(self, step: InFlightStep) -> None:
        self._steps.append(step)

    def complete(self, result: worker_pb2.StepResult) -> CompletedStep:
        """Complete the oldest plan. LaneLost unless each sampling row has a token or failed with a
        reason."""
        if not self._steps:
            raise LaneLost(
                f"the worker sent a result of step {result.step}, which is not in flight"
            )
        completed = _completed(self._steps[0], result)
        self._steps.popleft()
        return completed


def _completed(in_flight: InFlightStep, result: worker_pb2.StepResult) -> CompletedStep:
    step, scheduled = in_flight.step, in_flight.scheduled
    if (result.epoch, result.step) != (in_flight.epoch, step):
        raise LaneLost(
            f"the worker sent a result of step {result.step} of epoch {result.epoch}, "
            f"not of step {step} of epoch {in_flight.epoch}"
        )
    sampled_rows, token_ids = list(result.sampled_rows), list(result.sampled_token_ids)
    if len(sampled_rows) != len(token_ids):
        raise LaneLost(f"step {step}: {len(sampled_rows)} rows, {len(token_ids)} tokens")
    prompt_logprobs = _prompt_logprobs(scheduled, result)
    num_computed = _num_computed_tokens(scheduled, result)
    if sampled_rows == scheduled.sampling_rows and not result.failures:
        logprobs = _logprobs(scheduled.sampling, result)
        return CompletedStep(
            in_flight, scheduled.sampling, token_ids, logprobs, [], prompt_logprobs, num_computed
        )
    running = dict(zip(scheduled.rows, scheduled.sequences, strict=True))
    failures = {failure.row: _error(failure) for failure in result.failures}
    if not failures.keys() <= running.keys():
        raise LaneLost(f"the worker failed rows that step {step} did not run")
    _check_counts(in_flight, sampled_rows, failures)
    # Tokens that a failed row sampled in earlier rounds are dropped.
    valid = [at for at, row in enumerate(sampled_rows) if row not in failures]
    sequences = [running[row] for row in sampled_rows]
    logprobs = _logprobs(sequences, result)
    return CompletedStep(
        in_flight,
        [sequences[at] for at in valid],
        [token_ids[at] for at in valid],
        [logprobs[at] for at in valid] if logprobs else [],
        [(running[row], error) for row, error in failures.items()],
        prompt_logprobs,
        num_computed,
    )


def _error(failure: worker_pb2.RowFailure) -> RequestError:
    """The error with which the request of a failed row ends."""
    if failure.HasField("invalid_field"):
        field = failure.invalid_field
        return invalid(field.name, field.reason, failure.reason)
    return failed(StatusCode.INTERNAL, "ROW_FAILED", failure.reason)


def _check_counts(
    in_flight: InFlightStep, sampled_rows: list[int], failures: Collection[int]
) -> None:
    """LaneLost unless each sampling row has as many tokens as rounds, or failed earlier. A row with
    look-ahead may have none, and that many more in each round."""
    step, scheduled = in_flight.step, in_flight.scheduled
    lookahead = dict(zip(scheduled.rows, scheduled.num_lookahead_tokens, strict=False))
    num_expected, num_sampled = Counter(scheduled.sampling_rows), Counter(sampled_rows)
    for row, count in num_sampled.items():
        most = num_expected[row] * (1 + lookahead.get(row, 0))
        if count > most or (row in failures and count == num_expected[row] == most):
            raise LaneLost(f"step {step}: {count} tokens of row {row}, at most {most} expected")
    for row, count in num_expected.items():
        if num_sampled[row] < count and not (row in failures or lookahead.get(row)):
            raise LaneLost(f"the worker's result of step {step} does not match its plan")


def _num_computed_tokens(
    scheduled: ScheduledRows, result: worker_pb2.StepResult
) -> list[tuple[Sequence, int]]:
    """Computed tokens of the sequences with look-ahead. LaneLost unless all are reported."""
    counts = scheduled.num_lookahead_tokens
    if not (counts or result.lookahead_rows):
        return []
    places = [at for at, count in enumerate(counts) if count]
    failing = {failure.row for failure in result.failures}
    wanted = [scheduled.rows[at] for at in places if scheduled.rows[at] not in failing]
    if [row for row in result.lookahead_rows if row not in failing] != wanted or len(
        result.lookahead_rows
    ) != len(result.num_computed_tokens):
        raise LaneLost(f"the worker's computed tokens of step {result.step} do not match its plan")
    running = dict(zip(scheduled.rows, scheduled.sequences, strict=True))
    reported = zip(result.lookahead_rows, result.num_computed_tokens, strict=True)
    return [(running[row], count) for row, count in reported if row not in failing]


def _logprobs(sequences: list[Sequence], result: worker_pb2.StepResult) -> list[bytes]:
    """Packed log-probabilities of each token, as many as its sequence requests."""
    wanted = [sequence.group.params.num_logprobs for sequence in sequences]
    if not any(wanted):
        return []
    try:
        packed = pack_logprobs(result.logprobs)
    except ValueError as error:
        raise LaneLost(f"the worker's log-probabilities of step {result.step}: {error}") from None
    if [len(piece) for piece in packed] != [count * ENTRY_BYTES for count in wanted]:
        raise LaneLost(
            f"the worker's log-probabilities of step {result.step} do not match its plan"
        )
    return packed


def _prompt_logprobs(
    scheduled: ScheduledRows, result: worker_pb2.StepResult
) -> list[tuple[Sequence, int, bytes]]:
    if not result.HasField("prompt_logprobs"):
        return []
    found = result.prompt_logprobs
    running = dict(zip(scheduled.rows, scheduled.sequences, strict=True))
    ends = list(accumulate(map(mul, found.num_tokens, found.num_entries), initial=0))
    sequences = [running.get(row) for row in found.rows]
    widths = [one and one.group.params.num_prompt_logprobs for one in sequences]
    same_length = len(found.rows) == len(found.first_indices) == len(ends) - 1
    if (
        not same_length
        or widths != list(found.num_entries)
        or ends[-1] * ENTRY_BYTES != len(found.logprobs)
    ):
        raise LaneLost(
            f"the worker's log-probabilities of prompts of step {result.step} do not match its plan"
        )
    return [
        (sequence, first, found.logprobs[start * ENTRY_BYTES : end * ENTRY_BYTES])
        for sequence, first, (start, end) in zip(
            sequences, found.first_indices, pairwise(ends), strict=True
        )
        if sequence is not None
    ]

"""Plans that were sent and have not returned, oldest first."""

from collections import deque
from dataclasses import dataclass, field

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.logprobs import ENTRY_BYTES, pack_logprobs
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.stream import LaneLost


@dataclass(frozen=True, slots=True)
class Ran:
    """Rows and sequences in parallel: all that a plan schedules, and those that sample."""

    rows: list[int]
    sequences: list[Sequence]
    # Once per token that is due.
    due_rows: list[int]
    due: list[Sequence]


@dataclass(frozen=True, slots=True)
class Flight:
    """One plan. Its result belongs to those who ran, whoever has their rows by then."""

    epoch: int
    step: int
    ran: Ran
    num_tokens: int
    num_rounds: int
    sent_at: float  # of time.perf_counter
    # What the step had cost by then.
    scheduling_s: float
    redis_s: float


@dataclass(frozen=True, slots=True)
class Landing:
    """What a plan gave: tokens beside their sequences, and sequences whose rows failed."""

    flight: Flight
    sequences: list[Sequence]
    token_ids: list[int]
    # Packed, a string per token; no strings at all where nobody asked.
    logprobs: list[bytes] = field(default_factory=list)
    failures: list[tuple[Sequence, str]] = field(default_factory=list)


class Flights:
    """Results come in the order of the plans."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def oldest_sent_at(self) -> float | None:
        """By time.perf_counter."""
        return self._flights[0].sent_at if self._flights else None

    @property
    def sequences(self) -> set[Sequence]:
        """All that are in flight."""
        return {sequence for flight in self._flights for sequence in flight.ran.sequences}

    def start(self, flight: Flight) -> None:
        self._flights.append(flight)

    def land(self, result: worker_pb2.StepResult) -> Landing:
        """The oldest plan's result. LaneLost unless each row that was due a token has one, or a
        reason why not."""
        if not self._flights:
            raise LaneLost(f"the worker answered step {result.step}, which nobody asked for")
        landing = _landing(self._flights[0], result)
        self._flights.popleft()
        return landing


def _landing(flight: Flight, result: worker_pb2.StepResult) -> Landing:
    if (result.epoch, result.step) != (flight.epoch, flight.step):
        raise LaneLost(
            f"the worker answered step {result.step} of epoch {result.epoch}, "
            f"not step {flight.step} of epoch {flight.epoch}"
        )
    sampled_rows, token_ids = list(result.sampled_rows), list(result.sampled_token_ids)
    if len(sampled_rows) != len(token_ids):
        raise LaneLost(f"step {flight.step}: {len(sampled_rows)} rows, {len(token_ids)} tokens")
    if sampled_rows == flight.ran.due_rows and not result.failures:
        return Landing(flight, flight.ran.due, token_ids, _logprobs(flight.ran.due, result))
    running = dict(zip(flight.ran.rows, flight.ran.sequences, strict=True))
    failures = {failure.row: failure.reason for failure in result.failures}
    if not failures.keys() <= running.keys():
        raise LaneLost(f"the worker failed rows that step {flight.step} did not run")
    if any(sampled_rows.count(row) >= max(1, flight.ran.due_rows.count(row)) for row in failures):
        raise LaneLost(f"the worker failed rows of step {flight.step} that gave all their tokens")
    # What a row gave before the round in which it failed does not count.
    sound = [at for at, row in enumerate(sampled_rows) if row not in failures]
    sound_rows = sorted(sampled_rows[at] for at in sound)
    if sound_rows != sorted(row for row in flight.ran.due_rows if row not in failures):
        raise LaneLost(f"the worker's result of step {flight.step} is not that of its plan")
    sequences = [running[row] for row in sampled_rows]
    logprobs = _logprobs(sequences, result)
    return Landing(
        flight,
        [sequences[at] for at in sound],
        [token_ids[at] for at in sound],
        [logprobs[at] for at in sound] if logprobs else [],
        [(running[row], reason) for row, reason in failures.items()],
    )


def _logprobs(sequences: list[Sequence], result: worker_pb2.StepResult) -> list[bytes]:
    """Those of each sequence's token, as many as it asked for."""
    wanted = [sequence.group.params.num_logprobs for sequence in sequences]
    if not any(wanted):
        return []
    try:
        packed = pack_logprobs(result.logprobs)
    except ValueError as error:
        raise LaneLost(f"the worker's log-probabilities of step {result.step}: {error}") from None
    if [len(piece) for piece in packed] != [count * ENTRY_BYTES for count in wanted]:
        raise LaneLost(
            f"the worker's log-probabilities of step {result.step} are not those of its plan"
        )
    return packed

"""Finds the request that crashes workers: sequences of an unfinished step rerun one at a time."""

from grpc import StatusCode

from quire.service.errors import failed
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.sequence_table import SequenceTable


class Quarantine:
    """Runs at most one suspect of a lane at a time, alone, until a step that samples it ends."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._suspect: Sequence | None = None

    def suspect(self) -> Sequence | None:
        """The sequence that must run alone now."""
        if self._suspect is not None and not self._is_on_lane(self._suspect):
            self._suspect = None
        if self._suspect is None:
            assigned = self._table.assigned
            suspects = (other for other in assigned if other.is_suspect and not other.is_ended)
            self._suspect = next(suspects, None)
        return self._suspect

    def _is_on_lane(self, sequence: Sequence) -> bool:
        is_here = sequence.row is not None or sequence in self._table.assigned
        return is_here and not sequence.is_ended

    def clear(self, sampled: list[Sequence]) -> None:
        """Clear the suspect if a completed step sampled it."""
        if self._suspect is not None and self._suspect in sampled:
            self._suspect.is_suspect = False
            self._suspect = None

    def mark(self, unfinished: set[Sequence], is_dead: bool) -> None:
        """Mark sequences of unfinished steps of a lost worker as suspects. `is_dead`: the worker
        crashed and is not merely silent; a suspect that ran alone then fails."""
        for sequence in unfinished:
            sequence.is_suspect = True
        if is_dead and self._suspect in unfinished:
            message = "two workers crashed while they ran the request; the second ran nothing else"
            self._suspect.group.fail(failed(StatusCode.INTERNAL, "POISON", message))

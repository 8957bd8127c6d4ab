"""Finds the request that kills workers: who was in a step that never finished is tried alone."""

from grpc import StatusCode

from quire.service.errors import failed
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.roster import Roster


class Trial:
    """At most one suspect of a lane runs, and nobody beside it, until a step that samples it has
    ended."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._accused: Sequence | None = None

    def accused(self) -> Sequence | None:
        """Who is to run alone now."""
        if self._accused is not None and not self._is_here(self._accused):
            self._accused = None
        if self._accused is None:
            assigned = self._roster.assigned
            suspects = (other for other in assigned if other.is_suspect and not other.is_over)
            self._accused = next(suspects, None)
        return self._accused

    def _is_here(self, sequence: Sequence) -> bool:
        is_here = sequence.row is not None or sequence in self._roster.assigned
        return is_here and not sequence.is_over

    def acquit(self, sampled: list[Sequence]) -> None:
        """A step with these has ended well."""
        if self._accused is not None and self._accused in sampled:
            self._accused.is_suspect = False
            self._accused = None

    def blame(self, unfinished: set[Sequence], is_dead: bool) -> None:
        """The worker is lost with these in steps that it did not finish; `is_dead`: not just
        silent."""
        for sequence in unfinished:
            sequence.is_suspect = True
        if is_dead and self._accused in unfinished:
            message = "the request made a worker fail, alone, after another one had failed with it"
            self._accused.group.fail(failed(StatusCode.INTERNAL, "POISON", message))

"""Finds the request that crashes workers: sequences of an unfinished step rerun one at a time."""

import time
from collections.abc import Callable

import structlog
from grpc import StatusCode

from quire.service.errors import failed
from scheduler_svc.core.crashes import MAX_CONCLUSIVE, MAX_CRASHES, CrashHistory
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.lane.sequence_table import SequenceTable

log = structlog.get_logger()


class Quarantine:
    """Runs at most one suspect of a lane at a time, alone, until a step that samples it ends."""

    def __init__(self, table: SequenceTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock
        self._suspect: Sequence | None = None
        # When the worker last finished a step without a suspect.
        self._served_at = float("-inf")

    def suspect(self) -> Sequence | None:
        """The sequence that must run alone now."""
        if self._suspect is not None and not self._is_on_lane(self._suspect):
            self._suspect = None
        if self._suspect is None:
            self._suspect = self._next()
        return self._suspect

    def _next(self) -> Sequence | None:
        """The assigned suspect with the fewest crashes. One that has crashed a worker waits until
        this worker has run others, if there are any."""
        assigned = self._table.assigned
        if not assigned:
            # The common case, several times per step.
            return None
        suspects = [other for other in assigned if other.is_suspect and not other.is_ended]
        suspect = min(suspects, key=lambda other: other.lone_crashes.num_crashes, default=None)
        if suspect is None or not suspect.lone_crashes.num_crashes or self._has_served(suspect):
            return suspect
        return None if self._has_others() else suspect

    def _has_served(self, suspect: Sequence) -> bool:
        """Whether the worker has run others since the suspect's last worker was lost."""
        return self._served_at > suspect.suspected_at

    def _has_others(self) -> bool:
        others = (*self._table.rows, *self._table.assigned)
        return any(not (other.is_suspect or other.is_ended) for other in others)

    def _is_on_lane(self, sequence: Sequence) -> bool:
        is_here = sequence.row is not None or sequence in self._table.assigned
        return is_here and not sequence.is_ended

    def completed(self, sampled: list[Sequence]) -> None:
        """Note a completed step. It clears the suspect if it sampled it."""
        if self._suspect is not None and self._has_passed(self._suspect, sampled):
            self._suspect.is_suspect = False
            self._suspect.lone_crashes.clear()
            self._suspect = None
        if sampled:
            self._served_at = self._clock()

    @staticmethod
    def _has_passed(suspect: Sequence, sampled: list[Sequence]) -> bool:
        """Whether a step has sampled it; of a search, all beams that it had before."""
        beams = suspect.group.beams
        if beams is None or suspect.is_ended:
            return suspect in sampled
        return beams.is_caught_up and any(other.group is suspect.group for other in sampled)

    def worker_lost(self, unfinished: set[Sequence], is_dead: bool, crashes: CrashHistory) -> None:
        """Mark sequences of unfinished steps of a lost worker as suspects. `is_dead`: the worker
        crashed and is not merely silent; a suspect that ran alone then fails if it has crashed
        enough workers."""
        now = self._clock()
        # The first beam stands for a search.
        unfinished = {one.group.sequences[0] if one.is_beam else one for one in unfinished}
        if is_dead:
            if self._suspect in unfinished:
                key = self._suspect.group.key
                has_served = self._has_served(self._suspect)
                self._count(self._suspect, has_served and not crashes.has_other(key, now))
            crashes.add({sequence.group.key for sequence in unfinished}, now)
        for sequence in unfinished:
            sequence.is_suspect = True
            sequence.suspected_at = now

    def _count(self, suspect: Sequence, is_conclusive: bool) -> None:
        """Count a crash against the suspect's request, which fails if that was the last one."""
        suspect.lone_crashes.add(is_conclusive)
        group = suspect.group
        counts = [sequence.lone_crashes for sequence in group.sequences]
        num_crashes = sum(count.num_crashes for count in counts)
        num_conclusive = sum(count.num_conclusive for count in counts)
        log.warning(
            "worker lost while it ran one request alone",
            crashes=num_crashes,
            conclusive=num_conclusive,
            **group.record.log_fields,
        )
        if num_conclusive >= MAX_CONCLUSIVE or num_crashes >= MAX_CRASHES:
            _fail(group, num_crashes)


def _fail(group: Group, num_crashes: int) -> None:
    message = (
        f"{num_crashes} workers in a row crashed while they ran the request and nothing else, "
        "after one that ran it with others"
    )
    group.fail(failed(StatusCode.INTERNAL, "POISON", message))

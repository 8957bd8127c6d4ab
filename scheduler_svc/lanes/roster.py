"""Who is where on one worker."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_svc.core.queue import turn
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.lanes.host_blocks import HostBlocks
from scheduler_svc.lanes.rows import Rows


@dataclass(slots=True, eq=False)
class SwappedGroup:
    """Sequences of one group that wait on the host; siblings share host blocks."""

    sequences: list[Sequence]

    @property
    def order(self) -> tuple[int, int, int]:
        return self.sequences[0].order

    @property
    def host_blocks(self) -> list[int]:
        """Distinct ones, in the order of the tables."""
        return list(dict.fromkeys(b for other in self.sequences for b in other.block_ids))

    @property
    def last_step(self) -> int:
        """Behind it all tokens are known: the group can be admitted again."""
        return max(sequence.last_step for sequence in self.sequences)


class Roster:
    """A sequence is in one of these, or in the engine's queue, or gone:

    assigned   waits for a row here; in order
    rows       runs
    siblings   of `parents`: will be forked from them
    swapped    is on the host; in order
    late       has left its row, and its last tokens are in flight or not journaled
    """

    def __init__(self, num_rows: int, num_host_blocks: int) -> None:
        self.rows = Rows(num_rows)
        self.host_blocks = HostBlocks(num_host_blocks)
        # The last step whose result is there.
        self.landed_step = 0
        self.assigned: list[Sequence] = []
        # Groups with siblings to fork, or with a hold to give back; in order of admission.
        self.parents: list[Group] = []
        self.swapped: list[SwappedGroup] = []
        self.late: list[Sequence] = []

    def assign(self, sequence: Sequence) -> None:
        insort(self.assigned, sequence, key=turn)

    def swap_out(self, group: SwappedGroup) -> None:
        insort(self.swapped, group, key=lambda other: other.order)

    def swap_in(self, group: SwappedGroup) -> None:
        """Takes the group's sequences from the host; their contents are moved in this step."""
        self.host_blocks.give_back(group.host_blocks)
        self.swapped = [
            other for other in self.swapped if other.sequences[0] not in group.sequences
        ]

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.swapped or self.late or self.parents)

    @property
    def num_swapped(self) -> int:
        return sum(len(group.sequences) for group in self.swapped)

    @property
    def num_wanted_rows(self) -> int:
        """Rows that all on the lane have or will want, siblings included."""
        num_siblings = sum(len(group.siblings) for group in self.parents)
        num_assigned = sum(sequence.num_wanted_rows for sequence in self.assigned)
        return len(self.rows) + num_assigned + self.num_swapped + num_siblings

    @property
    def is_recalling(self) -> bool:
        """Somebody was preempted and cannot be admitted again yet: nobody may pass."""
        return any(not sequence.is_complete for sequence in self.late)

    def everybody(self) -> Iterator[Sequence]:
        """All but those who wait for a row."""
        yield from self.rows
        yield from self.late
        for swapped in self.swapped:
            yield from swapped.sequences
        for group in self.parents:
            yield from group.siblings

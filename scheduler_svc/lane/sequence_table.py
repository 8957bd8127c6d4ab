"""Sequences of one worker by state: assigned, running in rows, swapped, awaiting results."""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler_svc.core.queue import assigned_order
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.tracing.traced_sequences import TracedSequences


class Rows:
    """Sequences by row number; the lowest free row is used first.

    `references` counts, per held block, the block tables and the groups' `pinned_blocks` with it;
    the pool keeps the same counts.
    """

    def __init__(self, num_rows: int) -> None:
        self.references: Counter[int] = Counter()
        self._free = list(range(num_rows))
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def admit(self, sequence: Sequence) -> None:
        """Assign a row to a sequence whose blocks are referenced already."""
        row = heapq.heappop(self._free)
        self._sequences[row] = sequence
        sequence.row = row

    def release(self, sequence: Sequence) -> int:
        """Free the sequence's row."""
        row = sequence.row
        assert row is not None
        sequence.row = None
        heapq.heappush(self._free, row)
        del self._sequences[row]
        return row

    def add_references(self, block_ids: Iterable[int]) -> None:
        references = self.references
        for block_id in block_ids:
            references[block_id] += 1

    def drop_references(self, block_ids: Iterable[int]) -> int:
        """Drop one reference per block; return the number of blocks that lose their last one."""
        references = self.references
        num_freed = 0
        for block_id in block_ids:
            if references[block_id] == 1:
                del references[block_id]
                num_freed += 1
            else:
                references[block_id] -= 1
        return num_freed


class SwapSpace:
    """Free list of the worker's host blocks, lowest first; it lives as long as the lane."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def free(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            heapq.heappush(self._free, block_id)


@dataclass(slots=True, eq=False)
class SwappedGroup:
    """Sequences of one group in host memory; siblings share host blocks."""

    sequences: list[Sequence]

    @property
    def order(self) -> tuple[int, int, int]:
        return self.sequences[0].order

    @property
    def host_blocks(self) -> list[int]:
        """Distinct host blocks, in the order of the block tables."""
        return list(dict.fromkeys(b for other in self.sequences for b in other.block_ids))

    @property
    def last_step(self) -> int:
        """Once this step is complete, all tokens are known and the group can be swapped in."""
        return max(sequence.last_step for sequence in self.sequences)


class SequenceTable:
    """A sequence is in one of these, in the engine's queue, or finished:

    assigned          waits for a row; in order
    rows              runs
    forking_groups    waits, as a sibling, to be forked
    swapped           is in host memory; in order
    awaiting_results  has no row, and its last tokens are in flight or not journaled
    """

    def __init__(self, num_rows: int, num_host_blocks: int, worker: str = "") -> None:
        """`worker` is its address."""
        self.traced = TracedSequences(worker)
        self.rows = Rows(num_rows)
        self.swap_space = SwapSpace(num_host_blocks)
        # The last step whose result has arrived.
        self.completed_step = 0
        self.assigned: list[Sequence] = []
        # Groups with siblings to fork or pinned blocks to return; in order of admission.
        self.forking_groups: list[Group] = []
        self.swapped: list[SwappedGroup] = []
        # Searches with rows or swapped beams, in order of admission.
        self.beam_groups: dict[Group, None] = {}
        self.awaiting_results: list[Sequence] = []

    def assign(self, sequence: Sequence) -> None:
        insort(self.assigned, sequence, key=assigned_order)

    def swap_out(self, group: SwappedGroup) -> None:
        insort(self.swapped, group, key=lambda other: other.order)

    def swap_in(self, group: SwappedGroup) -> None:
        """Remove a group from host memory; its contents are moved in this step."""
        self.swap_space.free(group.host_blocks)
        self.swapped = [
            other for other in self.swapped if other.sequences[0] not in group.sequences
        ]

    @property
    def is_empty(self) -> bool:
        has_admitted = self.rows or self.swapped or self.awaiting_results or self.forking_groups
        return not (self.assigned or has_admitted)

    @property
    def num_swapped(self) -> int:
        return sum(len(group.sequences) for group in self.swapped)

    @property
    def num_wanted_rows(self) -> int:
        """Rows that sequences of the lane have or will need, siblings included."""
        num_siblings = sum(len(group.siblings) for group in self.forking_groups)
        num_assigned = sum(sequence.num_wanted_rows for sequence in self.assigned)
        return len(self.rows) + num_assigned + self.num_swapped + num_siblings

    @property
    def is_preempting(self) -> bool:
        """A preempted sequence is not requeued yet; nothing may overtake it."""
        return any(not sequence.is_complete for sequence in self.awaiting_results)

    def rows_in_flight(self) -> frozenset[Sequence]:
        """Rows that a plan without a result runs."""
        return frozenset(row for row in self.rows if row.last_step > self.completed_step)

    def all_admitted(self) -> Iterator[Sequence]:
        """All sequences but the assigned ones."""
        yield from self.rows
        yield from self.awaiting_results
        for swapped in self.swapped:
            yield from swapped.sequences
        for group in self.forking_groups:
            yield from group.siblings

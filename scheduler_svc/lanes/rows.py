"""The rows of one worker: which sequence has which, and in how many tables each block stands."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler_svc.core.sequence import Sequence


class Rows:
    """Sequences by row number. A free row is the lowest one.

    `references` counts, per held block, the tables of rows and the holds of groups it stands in;
    the pool counts the same.
    """

    def __init__(self, num_rows: int) -> None:
        self.references: Counter[int] = Counter()
        self._free = list(range(num_rows))
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __getitem__(self, row: int) -> Sequence:
        return self._sequences[row]

    def admit(self, sequence: Sequence) -> int:
        """Gives the sequence, whose blocks are counted already, a row."""
        row = heapq.heappop(self._free)
        self._sequences[row] = sequence
        sequence.row = row
        return row

    def release(self, sequence: Sequence) -> int:
        """Takes the row back."""
        row = sequence.row
        assert row is not None
        sequence.row = None
        heapq.heappush(self._free, row)
        del self._sequences[row]
        return row

    def hold(self, block_ids: Iterable[int]) -> None:
        """One reference more for each."""
        references = self.references
        for block_id in block_ids:
            references[block_id] += 1

    def let_go(self, block_ids: Iterable[int]) -> int:
        """One reference less for each; the number of those that have none left."""
        references = self.references
        num_freed = 0
        for block_id in block_ids:
            if references[block_id] == 1:
                del references[block_id]
                num_freed += 1
            else:
                references[block_id] -= 1
        return num_freed

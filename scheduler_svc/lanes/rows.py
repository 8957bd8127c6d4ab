"""The rows of one worker: which sequence has which."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler_svc.core.sequence import Sequence


class Rows:
    """Sequences by row number. A free row is the lowest one."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(num_rows))
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __getitem__(self, row: int) -> Sequence:
        return self._sequences[row]

    def __contains__(self, row: int) -> bool:
        return row in self._sequences

    def references(self) -> Counter[int]:
        """How many tables each block stands in."""
        return Counter(block_id for sequence in self for block_id in sequence.block_ids)

    def admit(self, sequence: Sequence, block_ids: Iterable[int], num_hits: int) -> int:
        """Gives the sequence a row and its block table, whose first blocks are hits."""
        row = heapq.heappop(self._free)
        self._sequences[row] = sequence
        sequence.row = row
        sequence.block_ids = list(block_ids)
        sequence.num_computed_tokens = num_hits * self._block_size
        sequence.num_hit_blocks = num_hits
        sequence.num_cached_tokens = sequence.num_computed_tokens
        return row

    def release(self, sequence: Sequence) -> int:
        """Takes the row back; its blocks are the pool's again."""
        row = sequence.row
        assert row is not None
        sequence.row = None
        sequence.block_ids = []
        heapq.heappush(self._free, row)
        del self._sequences[row]
        return row

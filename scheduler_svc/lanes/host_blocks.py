"""Host blocks of one worker, where swapped-out sequences keep what they had on the device."""

import heapq
from collections.abc import Iterable


class HostBlocks:
    """A plain free list; a free block is the lowest one. Nothing here outlives the lane."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            heapq.heappush(self._free, block_id)

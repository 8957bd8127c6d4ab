"""Numbers of rows that have a line in a table on the device."""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from worker_svc.logits.batch_cache import BatchCache
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.inputs import Ints


@dataclass(frozen=True)
class BatchSlots:
    """Lines of the logits and slots of their rows, on the device."""

    lines: Tensor  # int64 [num_lines]
    slots: Tensor  # int64 [num_lines]


class Slots:
    """Gives each row the lowest free slot, so that a table needs no line for every possible row."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._of_rows = np.zeros(context.max_num_seqs, np.int64)
        self._free: list[int] = []
        self._batch = BatchCache(self._gather)
        self.num_used = 0  # slots that were ever taken

    @contextmanager
    def take(self, row: int) -> Iterator[int]:
        """The slot of a row, until it is returned; at once if its line cannot be written."""
        slot = self._take(row)
        try:
            yield slot
        except BaseException:
            self.give_back(row)
            raise

    def _take(self, row: int) -> int:
        if not self._free:
            heapq.heappush(self._free, self.num_used)
            self.num_used += 1
        slot = heapq.heappop(self._free)
        self._of_rows[row] = slot
        self._batch.clear()
        return slot

    def give_back(self, row: int) -> None:
        heapq.heappush(self._free, int(self._of_rows[row]))

    def of(self, lines: Ints, rows: Ints) -> BatchSlots:
        """The slots of `rows[i]` for line `lines[i]`."""
        return self._batch.of(lines, rows)

    def of_rows(self, rows: Ints) -> Ints:
        """The slots of rows, on the host."""
        return self._of_rows[rows]

    def _gather(self, lines: Ints, rows: Ints) -> BatchSlots:
        upload = self._context.upload
        return BatchSlots(upload(lines), upload(self._of_rows[rows]))


def grown(table: Tensor, num_lines: int, most: int) -> Tensor:
    """The table with at least so many lines, the new ones zeros: doubled, up to `most` lines, so
    that the cost of copies stays small."""
    if num_lines <= len(table):
        return table
    larger = table.new_zeros(min(max(num_lines, 2 * len(table)), most), *table.shape[1:])
    larger[: len(table)] = table
    return larger

"""Tokens and values of rows, as index tensors for the lines of a batch."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.logits.batch_cache import BatchCache
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.inputs import Ints

Floats = NDArray[np.float32]
_NO_VALUES: Final[Floats] = np.empty(0, np.float32)


@dataclass(frozen=True)
class BatchEntries:
    """The entries of all lines of a batch, on the device."""

    lines: Tensor  # int64 [num_entries]
    token_ids: Tensor  # int64 [num_entries]
    values: Tensor  # float32 [num_entries]; empty if rows have none


class RowEntries:
    """Any number of different tokens per row, each with a value or all without."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._entries: dict[int, tuple[Ints, Floats]] = {}  # by row
        self._batch = BatchCache(self._gather)

    def set(self, row: int, token_ids: Ints, values: Floats = _NO_VALUES) -> bool:
        """Leaves out tokens that the logits do not have. Whether any are left."""
        kept = token_ids < self._context.vocab_size
        if not kept.any():
            return False
        self._entries[row] = token_ids[kept], values[kept] if len(values) else values
        self._batch.clear()
        return True

    def remove(self, row: int) -> None:
        del self._entries[row]
        self._batch.clear()

    def of(self, lines: Ints, rows: Ints) -> BatchEntries:
        """The entries of `rows[i]` for line `lines[i]`."""
        return self._batch.of(lines, rows)

    def _gather(self, lines: Ints, rows: Ints) -> BatchEntries:
        found = [self._entries[row] for row in rows.tolist()]
        counts = [len(token_ids) for token_ids, _ in found]
        upload = self._context.upload
        return BatchEntries(
            lines=upload(np.repeat(lines, counts)),
            token_ids=upload(np.concatenate([token_ids for token_ids, _ in found])),
            values=upload(np.concatenate([values for _, values in found])),
        )

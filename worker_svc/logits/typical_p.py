"""Locally typical sampling: the one change of logits that depends on the temperature."""

import numpy as np
from torch import Tensor

from kernels.typical_p import apply_typical_p
from worker_svc.logits.batch_cache import BatchCache
from worker_svc.logits.processor import ProcessorContext
from worker_svc.plan.inputs import Ints


class TypicalP:
    """`typical_p`, as transformers defines it, before top_k, top_p and min_p. Greedy rows have
    none."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self._temperatures = np.ones(context.max_num_seqs, np.float32)
        self._typical_ps = np.ones(context.max_num_seqs, np.float32)
        self._batch = BatchCache(self._gather)
        self._num_rows = 0  # with typical_p

    def admit(self, row: int, temperature: float, typical_p: float) -> None:
        if temperature > 0 and typical_p < 1:
            self._temperatures[row], self._typical_ps[row] = temperature, typical_p
            self._num_rows += 1
            self._batch.clear()

    def release(self, row: int) -> None:
        self._num_rows -= int(self._typical_ps[row] < 1)
        self._typical_ps[row] = 1

    def apply(self, logits: Tensor, rows: Ints) -> None:
        """Make tokens impossible; line i of `logits` is that of `rows[i]`."""
        if not self._num_rows:
            return
        lines = (self._typical_ps[rows] < 1).nonzero()[0]
        if len(lines):
            apply_typical_p(
                logits,
                *self._batch.of(lines, rows[lines]),
                implementation=self._context.implementation,
            )

    def _gather(self, lines: Ints, rows: Ints) -> tuple[Tensor, Tensor, Tensor]:
        upload = self._context.upload
        return upload(lines), upload(self._temperatures[rows]), upload(self._typical_ps[rows])

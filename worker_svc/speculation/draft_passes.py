"""Forward passes of a draft model over the rows' tokens."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import PagedBatch
from worker_svc.cache.kv_pool import KvPool
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.plan.inputs import InputBuffers, Ints, prepare_inputs
from worker_svc.plan.tables import RowTables


class DraftPasses:
    """The draft model's keys and values are in its own layers of the pool, in the slots of the same
    tokens: a block that is shared, copied or swapped has those of both models.

    Row invariant, `computed` being the table's:
        tokens  [0, cached) in the draft model's cache  [cached, computed) pending
    Every pass computes all pending tokens. They are computed at the latest before others may read
    their blocks: so the draft model's cache has what the target's has, in fewer and larger passes.
    """

    def __init__(
        self, model: ServedModel, attention: PagedAttention, pool: KvPool, tables: RowTables
    ) -> None:
        """`attention` is that of the draft model's layers in the pool, and set in the model."""
        self._model = model
        self._attention = attention
        self._pool = pool
        self._tables = tables
        self._num_cached = np.zeros(tables.max_num_seqs, np.int64)
        # Pending tokens, those of a step, and one of each row.
        most_tokens = 2 * tables.max_num_batched_tokens + tables.max_num_seqs
        self._buffers = InputBuffers(tables.max_num_seqs, most_tokens)

    def admit(self, row: int, num_computed_tokens: int) -> None:
        """Tokens that others have computed are in both caches."""
        self._num_cached[row] = num_computed_tokens

    def num_pending(self) -> int:
        """Tokens of all rows."""
        self._forget_rejected()
        return int((self._tables.num_computed_tokens - self._num_cached).sum())

    def catch_up(self) -> None:
        """Compute all pending tokens."""
        self._forget_rejected()
        rows = self._are_pending().nonzero()[0]
        if len(rows):
            self._compute(rows, self._tables.num_computed_tokens[rows], 0)

    def first_logits(self, rows: Ints) -> Tensor:
        """Logits behind the last tokens of `rows`, which these have yet to compute; float32
        `[len(rows), vocab_size]`. Computes all pending tokens as well."""
        self._forget_rejected()
        are_pending = self._are_pending()
        are_pending[rows] = False
        others = are_pending.nonzero()[0]
        ends = (self._tables.num_tokens[rows], self._tables.num_computed_tokens[others])
        logits = self._compute(np.concatenate([rows, others]), np.concatenate(ends), len(rows))
        assert logits is not None
        return logits

    def next_logits(self, rows: Ints) -> Tensor:
        """Those behind the next token in the table of each row: a draft."""
        logits = self._compute(rows, self._num_cached[rows] + 1, len(rows))
        assert logits is not None
        return logits

    def _forget_rejected(self) -> None:
        """Drafts that were not accepted, and rows that were released."""
        np.minimum(self._num_cached, self._tables.num_computed_tokens, out=self._num_cached)

    def _are_pending(self) -> NDArray[np.bool_]:
        """Whether rows have pending tokens."""
        return self._num_cached < self._tables.num_computed_tokens

    def _compute(self, rows: Ints, ends: Ints, num_read: int) -> Tensor | None:
        """Compute the tokens of rows up to `ends`. The logits behind those of the first `num_read`
        rows, if that is not 0."""
        tables, cached = self._tables, self._num_cached[rows]
        sampling_ends = np.where(np.arange(len(rows)) < num_read, ends, -1)
        inputs = prepare_inputs(
            rows,
            ends - cached,
            cached,
            sampling_ends,
            tables.token_table,
            tables.block_table,
            self._pool.block_size,
            self._buffers,
        )
        tensor = torch.from_numpy
        batch = PagedBatch(
            block_table=tensor(tables.block_tables(rows, inputs.seq_lens)),
            query_start_loc=tensor(inputs.query_start_loc),
            seq_lens=tensor(inputs.seq_lens),
            block_size=self._pool.block_size,
        )
        self._pool.wait_for_swap_outs(inputs.slot_mapping)
        self._attention.set_batch(batch, tensor(inputs.slot_mapping))
        ids, positions = tensor(inputs.input_ids), tensor(inputs.positions)
        self._num_cached[rows] = ends
        if not num_read:
            self._model.final_states(ids, positions)
            return None
        return self._model.logits(ids, positions, tensor(inputs.logits_indices))

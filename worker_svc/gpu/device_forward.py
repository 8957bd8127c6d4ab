"""The forward pass on a GPU with block tables in its memory: launched, or replayed from a graph."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.attention import PagedBatch
from worker_svc.gpu.device_inputs import BlockChanges, ForwardInputs, padding_arrays
from worker_svc.gpu.graphs import Capturer, DecodeGraphs, capture_decode
from worker_svc.gpu.staging import Staging
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import BatchStates, ServedModel


class DeviceForward:
    """A model, its block table, and the last token of each row. No method waits for the device."""

    def __init__(
        self,
        model: ServedModel,
        attention: PagedAttention,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        share_ids: Callable[[Tensor], object],
    ) -> None:
        """`share_ids` is called with the input ids in each pass, and may change them: other ranks
        of a worker get those of rank 0."""
        self.model = model
        self._share_ids = share_ids
        self.padding_row = max_num_seqs
        self._attention = attention
        self._block_size = block_size
        self._max_model_len = max_model_len
        width = -(-max_model_len // block_size)
        num_rows, device = max_num_seqs + 1, model.device
        self.block_table = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        # The last sampled token of each row; NO_TOKEN if the row failed.
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._graphs = DecodeGraphs({})
        self._graph_logits = torch.empty(0, device=device)

    def change_blocks(self, changes: BlockChanges) -> None:
        if len(changes.table_indices):
            self.block_table.view(-1).index_copy_(0, changes.table_indices, changes.block_ids)

    def write_last_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        self.last_tokens.index_copy_(0, rows, token_ids)

    def graph_size(self, num_rows: int, num_tokens: int) -> int | None:
        """The size of the graph for such a batch; None if there is none."""
        return self._graphs.size_for(num_rows) if num_rows == num_tokens else None

    def launch(
        self,
        inputs: ForwardInputs,
        logits_indices: Tensor,
        max_query_len: int,
        max_seq_len: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Float32 logits `[len(logits_indices), vocab_size]`. PLACEHOLDER_TOKEN is replaced in
        the inputs by the sampled token, or NO_TOKEN."""
        ids = self._set_batch(inputs, max_query_len, max_seq_len)
        return self.model.logits(ids, inputs.positions, logits_indices, out)

    def launch_states(
        self, inputs: ForwardInputs, max_query_len: int, max_seq_len: int
    ) -> BatchStates:
        """As `launch`, up to the head."""
        ids = self._set_batch(inputs, max_query_len, max_seq_len)
        return self.model.final_states(ids, inputs.positions)

    def replay(self, size: int, num_rows: int, logits_indices: Tensor) -> Tensor:
        """As `launch`, for a staged decode batch of `size` rows, all but the first `num_rows` of
        them padding. The logits are valid until the next call."""
        self._graphs.replay(size)
        if len(logits_indices) == num_rows:
            return self._graph_logits[:num_rows]
        return self._graph_logits.index_select(0, logits_indices)

    def capture(self, sizes: tuple[int, ...], staging: Staging, capturer: Capturer) -> None:
        """Capture graphs of these sizes, if that is possible."""

        def staged(size: int) -> Callable[[], object]:
            """A pass over padding."""
            tensors = staging.send(padding_arrays(self.padding_row, size))
            return partial(self._decode, ForwardInputs(**tensors), size)

        self._graphs = capture_decode(sizes, staged, capturer)

    def _decode(self, inputs: ForwardInputs, size: int) -> None:
        every_row = torch.arange(size, device=self.model.device)
        out = self._graph_logits[:size] if len(self._graph_logits) else None
        logits = self.launch(inputs, every_row, 1, self._max_model_len, out)
        if out is None:
            self._graph_logits = torch.empty_like(logits)

    def _set_batch(self, inputs: ForwardInputs, max_query_len: int, max_seq_len: int) -> Tensor:
        """Prepare a pass; return its input ids."""
        self._fill_in_sampled(inputs)
        batch = self._batch(inputs, max_query_len, max_seq_len)
        self._attention.set_batch(batch, inputs.slot_mapping)
        # A failed row continues with any token: its result is not reported.
        ids = inputs.input_ids.clamp_min(0)
        self._share_ids(ids)
        return ids

    def _fill_in_sampled(self, inputs: ForwardInputs) -> None:
        """Fill in sampled tokens: only the last token of a row can be missing on the host."""
        last = inputs.query_start_loc[1:] - 1
        ids = inputs.input_ids.index_select(0, last)
        sampled = self.last_tokens.index_select(0, inputs.rows)
        inputs.input_ids.index_copy_(0, last, torch.where(ids < 0, sampled, ids))

    def _batch(self, inputs: ForwardInputs, max_query_len: int, max_seq_len: int) -> PagedBatch:
        width = max(1, -(-max_seq_len // self._block_size))
        return PagedBatch(
            block_table=self.block_table[:, :width].index_select(0, inputs.rows),
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_size=self._block_size,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

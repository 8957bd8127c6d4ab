"""The inputs of one step, from the tables: pure index arithmetic, nothing per token in Python.

The algorithm is that of vLLM's model runner. Prefill, chunked prefill and decode are one case.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """What the forward pass and the sampler need. A request is one scheduled row.

    Flat arrays have one entry per scheduled token, requests one after the other. They lie in
    buffers that the next step's inputs take over.
    """

    request_indices: Ints  # the request of each token
    positions: Ints  # of each token within its sequence
    token_indices: Ints  # into the flat token table
    input_ids: Ints
    block_table_indices: Ints  # into the flat block table
    block_numbers: Ints
    block_offsets: Ints
    slot_mapping: Ints
    query_start_loc: Ints  # [num_requests + 1], where each request's tokens begin
    seq_lens: Ints  # [num_requests], this step's tokens included
    sampling: NDArray[np.bool_]  # [num_requests], whether the step reaches the last known token

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max(initial=0))

    @cached_property
    def logits_indices(self) -> Ints:
        """The last token of each request that samples, in the flat batch."""
        return self.query_start_loc[1:][self.sampling] - 1


class InputBuffers:
    """The memory of one step's inputs: allocated once, written anew by each step."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        self.ascending = np.arange(max(max_num_seqs, max_num_tokens))
        self.request_indices = np.empty(max_num_tokens, np.int64)
        self.token_rows = np.empty(max_num_tokens, np.int64)
        self.positions = np.empty(max_num_tokens, np.int64)
        self.token_indices = np.empty(max_num_tokens, np.int64)
        self.input_ids = np.empty(max_num_tokens, np.int64)
        self.block_table_indices = np.empty(max_num_tokens, np.int64)
        self.block_numbers = np.empty(max_num_tokens, np.int64)
        self.block_offsets = np.empty(max_num_tokens, np.int64)
        self.slot_mapping = np.empty(max_num_tokens, np.int64)
        self.query_start_loc = np.zeros(max_num_seqs + 1, np.int64)
        self.seq_lens = np.empty(max_num_seqs, np.int64)


def prepare_inputs(
    rows: Ints,
    num_scheduled_tokens: Ints,
    num_computed_tokens: Ints,
    num_tokens: Ints,
    token_table: NDArray[np.int32],
    block_table: NDArray[np.int32],
    block_size: int,
    buffers: InputBuffers,
) -> StepInputs:
    """Inputs of the scheduled `rows`; the next three arrays have one entry for each of them.

    `token_table` is `[max_num_seqs, max_model_len]`, `block_table`
    `[max_num_seqs, ceil(max_model_len / block_size)]`. A request samples when its sequence has no
    token after those of this step.
    """
    num_rows = len(rows)
    query_start_loc = buffers.query_start_loc[: num_rows + 1]
    np.cumsum(num_scheduled_tokens, out=query_start_loc[1:])
    total = int(query_start_loc[-1])

    request_indices = buffers.request_indices[:total]
    request_indices[:] = np.repeat(buffers.ascending[:num_rows], num_scheduled_tokens)
    positions = buffers.positions[:total]
    # A token's place in the batch, less its request's first one there, plus that one's position.
    _take(num_computed_tokens - query_start_loc[:-1], request_indices, positions)
    positions += buffers.ascending[:total]

    token_rows = _take(rows, request_indices, buffers.token_rows[:total])
    token_indices = buffers.token_indices[:total]
    np.multiply(token_rows, token_table.shape[1], out=token_indices)
    token_indices += positions
    input_ids = buffers.input_ids[:total]
    input_ids[:] = token_table.reshape(-1)[token_indices]

    block_table_indices = buffers.block_table_indices[:total]
    np.multiply(token_rows, block_table.shape[1], out=block_table_indices)
    block_offsets, slot_mapping = buffers.block_offsets[:total], buffers.slot_mapping[:total]
    # The buffer of the slots holds the blocks' places in their tables until the slots are known.
    np.divmod(positions, block_size, out=(slot_mapping, block_offsets))
    block_table_indices += slot_mapping
    block_numbers = buffers.block_numbers[:total]
    block_numbers[:] = block_table.reshape(-1)[block_table_indices]
    np.multiply(block_numbers, block_size, out=slot_mapping)
    slot_mapping += block_offsets

    seq_lens = buffers.seq_lens[:num_rows]
    np.add(num_computed_tokens, num_scheduled_tokens, out=seq_lens)
    return StepInputs(
        request_indices=request_indices,
        positions=positions,
        token_indices=token_indices,
        input_ids=input_ids,
        block_table_indices=block_table_indices,
        block_numbers=block_numbers,
        block_offsets=block_offsets,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        sampling=seq_lens == num_tokens,
    )


def _take(values: Ints, indices: Ints, out: Ints) -> Ints:
    """`values[indices]`. The indices are known to be in range: checking them costs a copy."""
    return values.take(indices, out=out, mode="clip")

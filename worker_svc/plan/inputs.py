"""The inputs of one step, computed from the tables by array operations only.

The algorithm is that of vLLM's model runner. Prefill, chunked prefill and decode are one case.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """What the forward pass and the sampler need. vLLM's names call a scheduled row a request.

    Flat arrays have one entry per scheduled token, row after row. They are views of buffers that
    the next step overwrites.
    """

    request_indices: Ints  # the row of each token, as index into the scheduled rows
    positions: Ints  # of each token within its sequence
    token_indices: Ints  # into the flat token table
    input_ids: Ints
    block_table_indices: Ints  # into the flat block table
    block_numbers: Ints
    block_offsets: Ints
    slot_mapping: Ints
    query_start_loc: Ints  # [num_requests + 1], the first token of each row
    seq_lens: Ints  # [num_requests], this step's tokens included
    sampling_mask: NDArray[np.bool_]  # [num_requests], where the last known token is included

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max(initial=0))

    def without_sampling(self, are_held: NDArray[np.bool_]) -> "StepInputs":
        """The same with fewer rows that sample."""
        return replace(self, sampling_mask=self.sampling_mask & ~are_held)

    @cached_property
    def logits_indices(self) -> Ints:
        """The last token of each row that samples, in the flat batch."""
        return self.query_start_loc[1:][self.sampling_mask] - 1


class InputBuffers:
    """The memory of one step's inputs: allocated once, overwritten by each step."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        self.ascending = np.arange(max(max_num_seqs, max_num_tokens))
        self.query_start_loc = np.zeros(max_num_seqs + 1, np.int64)
        self.seq_lens = np.empty(max_num_seqs, np.int64)
        # Of each scheduled token: the arrays of StepInputs, and the token's row.
        self.per_token = np.empty((9, max_num_tokens), np.int64)


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
    `[max_num_seqs, ceil(max_model_len / block_size)]`. A row samples when its sequence has no token
    after those of this step.
    """
    num_rows = len(rows)
    query_start_loc = buffers.query_start_loc[: num_rows + 1]
    np.cumsum(num_scheduled_tokens, out=query_start_loc[1:])
    seq_lens = np.add(num_computed_tokens, num_scheduled_tokens, out=buffers.seq_lens[:num_rows])
    total = int(query_start_loc[-1])
    request_indices, positions, token_rows, token_indices, input_ids, *of_blocks = (
        buffers.per_token[:, :total]
    )
    block_table_indices, block_numbers, block_offsets, slot_mapping = of_blocks

    request_indices[:] = np.repeat(buffers.ascending[:num_rows], num_scheduled_tokens)
    # A token's index in the batch, minus that of its row's first token, plus its position.
    _take(num_computed_tokens - query_start_loc[:-1], request_indices, positions)
    positions += buffers.ascending[:total]
    _take(rows, request_indices, token_rows)
    np.multiply(token_rows, token_table.shape[1], out=token_indices)
    token_indices += positions
    input_ids[:] = token_table.reshape(-1)[token_indices]

    np.multiply(token_rows, block_table.shape[1], out=block_table_indices)
    # `slot_mapping` holds the index of the token's block in its table until the slots are computed.
    np.divmod(positions, block_size, out=(slot_mapping, block_offsets))
    block_table_indices += slot_mapping
    block_numbers[:] = block_table.reshape(-1)[block_table_indices]
    np.multiply(block_numbers, block_size, out=slot_mapping)
    slot_mapping += block_offsets
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
        sampling_mask=seq_lens == num_tokens,
    )


def _take(values: Ints, indices: Ints, out: Ints) -> None:
    """`values[indices]` without a check of the indices, which would cost a copy."""
    values.take(indices, out=out, mode="clip")

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

    Flat arrays have one entry per scheduled token, requests one after the other.
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


def prepare_inputs(
    rows: Ints,
    num_scheduled_tokens: Ints,
    num_computed_tokens: Ints,
    num_tokens: Ints,
    token_table: NDArray[np.int32],
    block_table: NDArray[np.int32],
    block_size: int,
) -> StepInputs:
    """Inputs of the scheduled `rows`; the next three arrays have one entry for each of them.

    `token_table` is `[max_num_seqs, max_model_len]`, `block_table`
    `[max_num_seqs, ceil(max_model_len / block_size)]`. A request samples when its sequence has no
    token after those of this step.
    """
    request_indices = np.repeat(np.arange(len(rows)), num_scheduled_tokens)
    query_start_loc = np.concatenate([[0], np.cumsum(num_scheduled_tokens)])
    offsets = np.arange(query_start_loc[-1]) - query_start_loc[request_indices]
    positions = num_computed_tokens[request_indices] + offsets
    token_rows = rows[request_indices]
    token_indices = positions + token_rows * token_table.shape[1]
    block_table_indices = token_rows * block_table.shape[1] + positions // block_size
    block_numbers = block_table.ravel()[block_table_indices].astype(np.int64)
    block_offsets = positions % block_size
    seq_lens = num_computed_tokens + num_scheduled_tokens
    return StepInputs(
        request_indices=request_indices,
        positions=positions,
        token_indices=token_indices,
        input_ids=token_table.ravel()[token_indices].astype(np.int64),
        block_table_indices=block_table_indices,
        block_numbers=block_numbers,
        block_offsets=block_offsets,
        slot_mapping=block_numbers * block_size + block_offsets,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        sampling=seq_lens == num_tokens,
    )

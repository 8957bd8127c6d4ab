"""A ragged batch of queries over a paged cache, and its causal mask."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedBatch:
    """The queries of one step and the location of their keys; shared by all layers.

    The batch is flat: the tokens of all sequences, divided by `query_start_loc`.
    Queries are the last tokens of their sequences. Position p of sequence s is in block
    `block_table[s, p // block_size]` at offset `p % block_size`; unused entries are undefined. A
    sequence may have no query; one of length 0 has no key.
    """

    block_table: Tensor  # int32 [num_seqs, max_blocks]
    query_start_loc: Tensor  # int64 [num_seqs + 1]
    seq_lens: Tensor  # int64 [num_seqs], queries included
    block_size: int
    # Upper bounds on the host, so that reading them does not wait for the device.
    max_query_len: int | None = None
    max_seq_len: int | None = None

    @cached_property
    def query_lens(self) -> Tensor:
        return self.query_start_loc.diff()

    @cached_property
    def longest_query(self) -> int:
        """`max_query_len`, read from the device if unknown."""
        return int(self.query_lens.max()) if self.max_query_len is None else self.max_query_len

    @cached_property
    def longest_seq(self) -> int:
        """`max_seq_len`, read from the device if unknown."""
        return int(self.seq_lens.max()) if self.max_seq_len is None else self.max_seq_len


def attention_mask(positions: Tensor, num_keys: int, sliding_window: int | None = None) -> Tensor:
    """Which of `num_keys` keys a query sees: bool `[*positions.shape, num_keys]`.

    A query at position p sees the keys 0..p, or the last `sliding_window` of them. With
    `positions = arange(n)` this is the causal mask of a batch of whole prompts.
    """
    keys = torch.arange(num_keys, device=positions.device)
    queries = positions.unsqueeze(-1)
    visible = keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    return visible

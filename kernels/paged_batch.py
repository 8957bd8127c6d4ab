"""A ragged batch of queries over a paged cache, and who sees what."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedBatch:
    """Where the queries of one step stand, and where their keys lie; shared by all layers.

    The batch is flat: the tokens of all sequences one after the other, cut by `query_start_loc`.
    Queries are the last tokens of their sequences. Position p of a sequence lies in block
    `block_table[p // block_size]` at offset `p % block_size`; entries after the last one used mean
    nothing. A sequence may have no query; one of length 0 sees no key.
    """

    block_table: Tensor  # int32 [num_seqs, max_blocks]
    query_start_loc: Tensor  # int64 [num_seqs + 1]
    seq_lens: Tensor  # int64 [num_seqs], queries included
    block_size: int
    # What the host knows, so that nobody has to wait for the device; no less than the true ones.
    max_query_len: int | None = None
    max_seq_len: int | None = None

    @cached_property
    def query_lens(self) -> Tensor:
        return self.query_start_loc.diff()

    @cached_property
    def longest_query(self) -> int:
        """`max_query_len`, asked of the device if it is not known."""
        return int(self.query_lens.max()) if self.max_query_len is None else self.max_query_len

    @cached_property
    def longest_seq(self) -> int:
        """`max_seq_len`, asked of the device if it is not known."""
        return int(self.seq_lens.max()) if self.max_seq_len is None else self.max_seq_len


def attention_mask(positions: Tensor, num_keys: int, sliding_window: int | None = None) -> Tensor:
    """Which of `num_keys` keys a query sees: bool `[*positions.shape, num_keys]`.

    A query at position p sees the keys 0..p, or the last `sliding_window` of them. With
    `positions = arange(n)` this is the one causal mask that serves a batch of whole prompts.
    """
    keys = torch.arange(num_keys, device=positions.device)
    queries = positions.unsqueeze(-1)
    visible = keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    return visible

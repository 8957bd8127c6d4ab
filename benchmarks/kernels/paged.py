"""Batches over paged caches, and over contiguous keys and values for torch's attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.attention import PagedBatch, paged_attention

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length, of which the last `query_len` tokens are queries."""

    num_seqs: int
    seq_len: int
    query_len: int
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.float32  # of the cache

    @property
    def query_dtype(self) -> torch.dtype:
        """That of a model which is served with such a cache; bfloat16 where it has 8 bits."""
        return torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        numbers = 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_dim
        return numbers * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of the two products, without masked keys."""
        unseen = self.query_len * (self.query_len - 1) // 2
        pairs = self.query_len * self.seq_len - unseen
        return 4 * self.num_seqs * self.num_heads * self.head_dim * pairs

    @property
    def title(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.num_seqs} x {self.seq_len}, {heads}, {str(self.dtype)[6:]}"


class PagedTensors:
    """A batch with blocks in random order."""

    def __init__(self, shape: Shape) -> None:
        blocks_per_seq = -(-shape.seq_len // _BLOCK_SIZE)
        num_blocks = 1 + shape.num_seqs * blocks_per_seq
        size = (num_blocks, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        self.shape = shape
        self.k_cache = torch.randn(size).to(shape.dtype)
        self.v_cache = torch.randn(size).to(shape.dtype)
        self.block_table = (torch.randperm(num_blocks - 1) + 1).int().view(shape.num_seqs, -1)
        self.batch = PagedBatch(
            self.block_table,
            torch.arange(shape.num_seqs + 1) * shape.query_len,
            torch.full((shape.num_seqs,), shape.seq_len),
            _BLOCK_SIZE,
        )
        num_tokens = shape.num_seqs * shape.query_len
        query = torch.randn(num_tokens, shape.num_heads, shape.head_dim)
        self.query = query.to(shape.query_dtype)
        self.out = torch.empty_like(self.query)

    def attend(self) -> Tensor:
        scale = self.shape.head_dim**-0.5
        return paged_attention(
            self.query, self.k_cache, self.v_cache, self.batch, scale=scale, out=self.out
        )

    def gather_and_attend(self) -> Tensor:
        """Run torch's attention after a gather of the blocks, in the cache's dtype."""
        return _attend(self._dense_query(), self._gather(self.k_cache), self._gather(self.v_cache))

    def _dense_query(self) -> Tensor:
        """`[num_seqs, num_heads, query_len, head_dim]`"""
        shape = self.shape
        query = self.query.view(shape.num_seqs, shape.query_len, *self.query.shape[1:])
        return query.transpose(1, 2).to(shape.dtype)

    def _gather(self, cache: Tensor) -> Tensor:
        """`[num_seqs, num_kv_heads, seq_len, head_dim]` as a view of a gather of the blocks."""
        sequences = cache[self.block_table.long()].flatten(1, 2)[:, : self.shape.seq_len]
        return sequences.transpose(1, 2)


class DenseTensors:
    """A batch with keys and values contiguous per head."""

    def __init__(self, shape: Shape) -> None:
        size = (shape.num_seqs, shape.num_kv_heads, shape.seq_len, shape.head_dim)
        self.keys, self.values = (torch.randn(size).to(shape.dtype) for _ in range(2))
        query_size = (shape.num_seqs, shape.num_heads, shape.query_len, shape.head_dim)
        self.query = torch.randn(query_size).to(shape.dtype)

    def attend(self) -> Tensor:
        return _attend(self.query, self.keys, self.values)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Run torch's attention: causal, or with one query, which attends to all keys."""
    return F.scaled_dot_product_attention(
        query, keys, values, is_causal=query.shape[2] > 1, enable_gqa=True
    )

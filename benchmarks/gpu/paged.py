"""Batches over paged caches on a device, with a check against torch's attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import PagedBatch, paged_attention

DTYPE = torch.bfloat16
# Relative RMS difference, for bfloat16.
_MOST_DIFFERENCE = 1e-2


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length, of which the last `query_len` tokens are queries."""

    num_seqs: int
    seq_len: int
    query_len: int
    block_size: int
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        numbers = 2 * self.num_seqs * self.seq_len * self.num_kv_heads * self.head_dim
        return numbers * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Operations of the two products, without masked keys."""
        unseen = self.query_len * (self.query_len - 1) // 2
        pairs = self.query_len * self.seq_len - unseen
        return 4 * self.num_seqs * self.num_heads * self.head_dim * pairs

    @property
    def title(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.num_seqs} x {self.seq_len}, {heads}, blocks of {self.block_size}"


class PagedTensors:
    """The same keys and values twice: contiguous, and in blocks in random order."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        blocks_per_seq = -(-shape.seq_len // shape.block_size)
        num_blocks = 1 + shape.num_seqs * blocks_per_seq
        size = (shape.num_seqs, shape.num_kv_heads, shape.seq_len, shape.head_dim)
        self.keys, self.values = (torch.randn(size, device=device, dtype=DTYPE) for _ in "kv")
        order = torch.randperm(num_blocks - 1, device=device) + 1
        block_table = order.int().view(shape.num_seqs, blocks_per_seq)
        self._k_cache, self._v_cache = (
            _in_blocks(states, block_table, num_blocks, shape.block_size)
            for states in (self.keys, self.values)
        )
        self._batch = PagedBatch(
            block_table=block_table,
            query_start_loc=torch.arange(shape.num_seqs + 1, device=device) * shape.query_len,
            seq_lens=torch.full((shape.num_seqs,), shape.seq_len, device=device),
            block_size=shape.block_size,
            max_query_len=shape.query_len,
            max_seq_len=shape.seq_len,
        )
        num_tokens = shape.num_seqs * shape.query_len
        self.query = torch.randn(
            num_tokens, shape.num_heads, shape.head_dim, device=device, dtype=DTYPE
        )
        self._out = torch.empty_like(self.query)

    def attend(self) -> Tensor:
        """Run the kernel."""
        return paged_attention(
            self.query,
            self._k_cache,
            self._v_cache,
            self._batch,
            scale=self.shape.head_dim**-0.5,
            out=self._out,
        )

    def attend_in_order(self, *, flash: bool = True) -> Tensor:
        """Run torch's attention on contiguous keys and values: causal, with as many queries as
        keys, or with one query, which attends to all keys."""
        backends = [SDPBackend.FLASH_ATTENTION] if flash else list(_ANY_BACKEND)
        query = self.query.view(
            self.shape.num_seqs, self.shape.query_len, *self.query.shape[1:]
        ).transpose(1, 2)
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(
                query,
                self.keys,
                self.values,
                is_causal=self.shape.query_len > 1,
                enable_gqa=True,
            )

    def check(self) -> None:
        """ValueError if the kernel's output of the first or the last sequence differs from torch's
        in float32."""
        shape = self.shape
        self._out.fill_(torch.nan)
        out = self.attend().view(shape.num_seqs, shape.query_len, *self.query.shape[1:]).float()
        query = self.query.view(out.shape).transpose(1, 2)
        for seq in {0, shape.num_seqs - 1}:
            expected = F.scaled_dot_product_attention(
                query[seq : seq + 1].float(),
                self.keys[seq : seq + 1].float(),
                self.values[seq : seq + 1].float(),
                is_causal=shape.query_len > 1,
                enable_gqa=True,
            ).transpose(1, 2)[0]
            difference = (out[seq] - expected).square().mean() / expected.square().mean()
            if not difference.sqrt() < _MOST_DIFFERENCE:
                wrong_by = float(difference.sqrt())
                raise ValueError(f"{shape.title}: the kernel is wrong by {wrong_by:.3}")


_ANY_BACKEND = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def _in_blocks(states: Tensor, block_table: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Copy `[num_seqs, heads, seq_len, dim]` to a cache; slots after a sequence's end are NaN."""
    num_seqs, num_heads, seq_len, dim = states.shape
    size = (num_seqs, block_table.shape[1] * block_size, num_heads, dim)
    padded = states.new_full(size, torch.nan)
    padded[:, :seq_len] = states.transpose(1, 2)
    cache = states.new_zeros(num_blocks, block_size, num_heads, dim)
    cache[block_table.flatten().long()] = padded.view(-1, block_size, num_heads, dim)
    return cache

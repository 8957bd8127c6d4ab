"""Random queries over paged caches. Numbers that must not be read are NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from implementations import WITHOUT_PRODUCTS

from kernels.attention import PagedBatch
from kernels.dispatch import Implementation

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Ids of no block: one is slightly below the smallest id, one far above the largest.
GARBAGE_BLOCK_IDS = (-7, 2**31 - 1)


@dataclass(frozen=True)
class PagedCase:
    """Arguments of `paged_attention`."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PagedBatch

    def to(self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> "PagedCase":
        cache_dtype = dtype if cache_dtype is None else cache_dtype
        return replace(
            self,
            query=self.query.to(dtype),
            k_cache=self.k_cache.to(cache_dtype),
            v_cache=self.v_cache.to(cache_dtype),
        )


def paged_case(
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 12,
    v_head_dim: int | None = None,
    seed: int = 0,
) -> PagedCase:
    """Blocks of no sequence and slots past a sequence's end hold NaN; table entries after the last
    one used are no blocks. `heads` are those of queries and of keys."""
    draw = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = 1 + sum(counts) + 2
    blocks = (torch.randperm(num_blocks - 1, generator=draw) + 1).tolist()
    block_table = torch.empty(len(seq_lens), max(counts) + 2, dtype=torch.int32)
    block_table[:, 0::2], block_table[:, 1::2] = GARBAGE_BLOCK_IDS
    slots = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for seq, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        held = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int32)
        block_table[seq, :count] = held
        positions = torch.arange(count * block_size).view(count, block_size)
        slots[held.long()] = positions < length
    k_cache, v_cache = (
        torch.randn(num_blocks, block_size, num_kv_heads, dim, generator=draw).masked_fill(
            ~slots[:, :, None, None], torch.nan
        )
        for dim in (head_dim, v_head_dim)
    )
    return PagedCase(
        torch.randn(sum(query_lens), num_heads, head_dim, generator=draw),
        k_cache,
        v_cache,
        PagedBatch(
            block_table,
            torch.tensor([0, *query_lens]).cumsum(0),
            torch.tensor(seq_lens),
            block_size,
        ),
    )


def apart(cache: torch.Tensor) -> torch.Tensor:
    """The same numbers in a view of a larger cache of NaN: blocks, slots and heads lie apart."""
    larger = torch.full([2 * size for size in cache.shape], torch.nan).to(cache.dtype)
    view = larger[1::2, 1::2, 1::2, : cache.shape[3]]
    return view.copy_(cache)


def implementations() -> list[Implementation]:
    """The implementations that this processor runs, except the reference."""
    return [Implementation.TORCH, *WITHOUT_PRODUCTS]


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set torch's number of threads for a block of code."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the differences, relative to that of `expected`; NaN if a number is
    not finite."""
    difference = (actual.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().square().mean().sqrt())

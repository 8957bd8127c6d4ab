"""Paged attention against its twin, with everything unseen poisoned."""

import pytest
import torch

from kernels.attention import PagedBatch, paged_attention, paged_attention_reference

_HEAD_DIM, _V_HEAD_DIM, _KV_HEADS, _HEADS = 12, 7, 2, 6


def paged_case(
    query_lens: list[int], seq_lens: list[int], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Random queries and caches; slots of no sequence hold NaN."""
    draw = torch.Generator().manual_seed(0)
    num_blocks = 1 + sum(-(-length // block_size) for length in seq_lens) + 2
    blocks = (torch.randperm(num_blocks - 1, generator=draw) + 1).tolist()
    block_table = torch.zeros(len(seq_lens), 40, dtype=torch.int32)
    k_cache = torch.full((num_blocks, block_size, _KV_HEADS, _HEAD_DIM), torch.nan)
    v_cache = torch.full((num_blocks, block_size, _KV_HEADS, _V_HEAD_DIM), torch.nan)
    for seq, length in enumerate(seq_lens):
        for position in range(length):
            if position % block_size == 0:
                block_table[seq, position // block_size] = blocks.pop()
            block = int(block_table[seq, position // block_size])
            k_cache[block, position % block_size] = torch.randn(
                _KV_HEADS, _HEAD_DIM, generator=draw
            )
            v_cache[block, position % block_size] = torch.randn(
                _KV_HEADS, _V_HEAD_DIM, generator=draw
            )
    query = torch.randn(sum(query_lens), _HEADS, _HEAD_DIM, generator=draw)
    start_loc = torch.tensor([0, *query_lens]).cumsum(0)
    return (
        query,
        k_cache,
        v_cache,
        PagedBatch(block_table, start_loc, torch.tensor(seq_lens), block_size),
    )


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "block_size"),
    [
        ([1], [1], 1),
        ([1, 1, 1, 1], [1, 63, 16, 100], 16),
        ([5, 1, 3, 3, 16], [5, 33, 8, 3, 48], 8),
        ([63, 100], [63, 100], 5),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 6},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-1, 2, _HEADS)},
        {"sliding_window": 1, "softcap": 5.0, "sinks": torch.zeros(_HEADS)},
    ],
    ids=["plain", "window", "softcap", "sinks", "all"],
)
def test_equals_its_twin(
    query_lens: list[int], seq_lens: list[int], block_size: int, options: dict[str, object]
) -> None:
    case = paged_case(query_lens, seq_lens, block_size)
    out = paged_attention(*case, scale=0.3, **options)  # type: ignore[arg-type]
    expected = paged_attention_reference(*case, scale=0.3, **options)  # type: ignore[arg-type]
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_dtype_is_the_query_s_and_the_sum_is_float32() -> None:
    query, k_cache, v_cache, batch = paged_case([1, 4], [50, 9], 4)
    out = paged_attention(query.half(), k_cache.half(), v_cache.half(), batch, scale=0.3)
    exact = paged_attention(
        query.half().float(), k_cache.half().float(), v_cache.half().float(), batch, scale=0.3
    )
    assert out.dtype == torch.float16
    assert out.equal(exact.half())

"""Paged attention: every implementation against the reference. Unseen numbers are NaN."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from implementations import OF_ATTENTION
from kernel_internals import attention_items
from paged_cases import FP8, PagedCase, paged_case, relative_rms, threads
from pairwise import pairwise
from torch import Tensor

from kernels.attention import paged_attention, paged_attention_reference
from kernels.dispatch import Implementation, cpp_implementations

_SCALE = 0.2
# Whole prompts, chunks, prefix-cached prompts and decoded tokens; a row without a query, and exact
# multiples of blocks of 8 and 16.
_QUERY_LENS = [1, 63, 1, 100, 0, 7, 1, 129, 1, 16]
_SEQ_LENS = [1, 63, 129, 100, 5, 128, 100, 129, 63, 64]
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
# Of queries, and of the numbers that are in the caches.
_SINGLE = (torch.float32, torch.float32)
_HALVES = [(dtype, dtype) for dtype in (torch.float16, torch.bfloat16)]
_EIGHT_BITS = list(product((torch.float32, torch.float16, torch.bfloat16), FP8))
# It differs from AVX-512 in queries of bfloat16.
_OF_BFLOAT16 = Implementation.CPP_AVX512_BF16
_FACTORS = {
    "heads": [(4, 4), (8, 2), (5, 1), (32, 8)],
    "head_dim": [64, 80, 96, 128, 256],
    "block_size": [8, 16, 64, 256],
    "window": [None, 4, 64],
    "softcap": [None, 50.0],
    "sinks": [False, True],
    "partition_keys": [None, 64, 128],
}


def implementations(query_dtype: torch.dtype = torch.float32) -> list[Implementation]:
    """The implementations for such queries that this processor runs, except the reference."""
    wide = query_dtype != torch.bfloat16
    one_for_all = [one for one in OF_ATTENTION if not (wide and one == _OF_BFLOAT16)]
    return [Implementation.TORCH, *one_for_all]


def assert_all_equal_the_reference(
    case: PagedCase, options: dict[str, Any], partition_keys: tuple[int | None, ...] = (None,)
) -> None:
    """Torch's own small operations have one thread: several would mostly wait for each other, for
    long where other processes have the cores."""
    arguments = (case.query, case.k_cache, case.v_cache, case.batch)
    num_threads = torch.get_num_threads()
    with threads(1):
        expected = paged_attention_reference(*arguments, scale=_SCALE, **options)
        assert expected.isfinite().all()
        for implementation, keys in product(implementations(case.query.dtype), partition_keys):
            out = torch.full_like(expected, torch.nan)
            with threads(num_threads if implementation.is_cpp else 1):
                paged_attention(
                    *arguments,
                    scale=_SCALE,
                    partition_keys=keys,
                    implementation=implementation,
                    out=out,
                    **options,
                )
            error = relative_rms(out, expected)
            assert error < _TOLERANCES[case.query.dtype], (implementation, keys, options, error)


@pytest.mark.parametrize(
    "head_dim", [64, 80, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (96, 128, 256))]
)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1), (32, 8)])
def test_every_feature_with_every_other(heads: tuple[int, int], head_dim: int) -> None:
    case = paged_case(_QUERY_LENS, _SEQ_LENS, 16, heads, head_dim)
    sinks = torch.linspace(-2, 3, heads[0])
    for window, softcap, with_sinks in product((None, 4, 64), (None, 50.0), (False, True)):
        options = {
            "sliding_window": window,
            "softcap": softcap,
            "sinks": sinks if with_sinks else None,
        }
        assert_all_equal_the_reference(case, options)


def assert_all_equal_the_reference_with(
    factors: dict[str, Any], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    heads = factors["heads"]
    case = paged_case(_QUERY_LENS, _SEQ_LENS, factors["block_size"], heads, factors["head_dim"])
    eight_bits = cache_dtype.itemsize == 1
    options = {
        "sliding_window": factors["window"],
        "softcap": factors["softcap"],
        "sinks": torch.linspace(-2, 3, heads[0]) if factors["sinks"] else None,
        "k_scale": 0.7 if eight_bits else 1.0,
        "v_scale": 2.5 if eight_bits else 1.0,
    }
    assert_all_equal_the_reference(
        case.to(dtype, cache_dtype), options, (factors["partition_keys"],)
    )


@pytest.mark.parametrize("factors", pairwise(_FACTORS), ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [
        _SINGLE,
        _EIGHT_BITS[-1],
        *(pytest.param(d, marks=pytest.mark.slow) for d in (*_HALVES, *_EIGHT_BITS[:-1])),
    ],
    ids=str,
)
def test_every_two_features_together_in_every_format(
    dtypes: tuple[torch.dtype, torch.dtype], factors: dict[str, Any]
) -> None:
    assert_all_equal_the_reference_with(factors, *dtypes)


@pytest.mark.parametrize("factors", pairwise(_FACTORS | {"partition_keys": [64, 128]}), ids=str)
@pytest.mark.parametrize("dtypes", [_SINGLE, _HALVES[1]], ids=str)
def test_every_two_features_together_in_parts(
    dtypes: tuple[torch.dtype, torch.dtype], factors: dict[str, Any]
) -> None:
    assert_all_equal_the_reference_with(factors, *dtypes)


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 64, 128, 256])
def test_blocks_of_every_size(block_size: int) -> None:
    assert_all_equal_the_reference(paged_case(_QUERY_LENS, _SEQ_LENS, block_size), {})


@pytest.mark.parametrize("dtypes", [_SINGLE, *_HALVES, *_EIGHT_BITS[:2]], ids=str)
@pytest.mark.parametrize("window", [None, 64])
def test_lengths_at_the_edges_of_the_largest_blocks(
    window: int | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = paged_case([1, 256, 1, 40, 130], [255, 256, 257, 512, 600], 256, (8, 2), 64)
    assert_all_equal_the_reference(case.to(*dtypes), {"sliding_window": window}, (None, 64))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(1, 1), (12, 7), (7, 33), (192, 128)])
def test_heads_of_odd_sizes(head_dim: int, v_head_dim: int) -> None:
    assert_all_equal_the_reference(
        paged_case(_QUERY_LENS, _SEQ_LENS, 8, (6, 2), head_dim, v_head_dim), {}
    )


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 7, 8, 9, 71, 128])
def test_one_key_head_for_many(group_size: int) -> None:
    case = paged_case([1, 2, 20], [77, 200, 150], 16, (group_size, 1), 64)
    assert_all_equal_the_reference(case, {}, (None, 64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = paged_case(_QUERY_LENS, _SEQ_LENS, 16, (8, 2), 80).to(dtype)
    assert_all_equal_the_reference(case, {}, (None, 64))
    assert_all_equal_the_reference(case, {"sliding_window": 64, "softcap": 50.0})


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_of_8_bits(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = paged_case(_QUERY_LENS, _SEQ_LENS, 16, (8, 2), 80).to(dtype, cache_dtype)
    options = {"k_scale": 0.7, "v_scale": 2.5}
    assert_all_equal_the_reference(case, options, (None, 64))
    assert_all_equal_the_reference(case, options | {"sinks": torch.ones(8), "sliding_window": 64})


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        *product((torch.float32,), (*FP8, torch.float16, torch.bfloat16)),
        *product((torch.bfloat16,), (*FP8, torch.bfloat16)),
    ],
    ids=str,
)
def test_every_number_of_a_format_is_read_right(
    dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """Attention to one key is its value. Dot products of bfloat16 read the smallest numbers, which
    are not normalised, as zeros."""
    size = cache_dtype.itemsize
    bits = torch.arange(256**size).to(torch.uint8 if size == 1 else torch.uint16)
    values = bits.view(cache_dtype).view(-1, 1, 1, 256)
    if dtype == cache_dtype:
        values = values.masked_fill(values.float().abs() < torch.finfo(dtype).tiny, 0.0)
    num_seqs = values.shape[0]
    case = paged_case([1] * num_seqs, [1] * num_seqs, 1, (1, 1), 1)
    batch = replace(case.batch, block_table=torch.arange(num_seqs, dtype=torch.int32).unsqueeze(1))
    for implementation in implementations(dtype):
        out = paged_attention(
            torch.ones(num_seqs, 1, 1).to(dtype),
            torch.ones(num_seqs, 1, 1, 1).to(cache_dtype),
            values,
            batch,
            scale=1.0,
            implementation=implementation,
        )
        expected = values.float().view_as(out)
        assert torch.equal(out.float().nan_to_num(9e9), expected.nan_to_num(9e9))


@pytest.mark.skipif(_OF_BFLOAT16 not in OF_ATTENTION, reason="the processor has no bfloat16")
@pytest.mark.parametrize("query_lens", [[1, 1, 4], [1, 90, 300]])
@pytest.mark.parametrize("cache_dtype", [*FP8, torch.bfloat16])
def test_rounded_weights_add_up_to_one(query_lens: list[int], cache_dtype: torch.dtype) -> None:
    case = paged_case(query_lens, [9, 190, 300], 16, (4, 2), 64).to(torch.bfloat16, cache_dtype)
    out = paged_attention(
        case.query,
        case.k_cache,
        torch.ones_like(case.v_cache),
        case.batch,
        scale=_SCALE,
        implementation=_OF_BFLOAT16,
    )
    assert (out == 1).all()


@pytest.mark.skipif(_OF_BFLOAT16 not in OF_ATTENTION, reason="the processor has no bfloat16")
@pytest.mark.parametrize("query_lens", [[1, 1, 4], [1, 90, 300]])
@pytest.mark.parametrize("cache_dtype", [*FP8, torch.bfloat16])
def test_rounded_weights_add_less_error_than_the_output_has(
    query_lens: list[int], cache_dtype: torch.dtype
) -> None:
    case = paged_case(query_lens, [9, 190, 300], 16, (4, 2), 64).to(torch.bfloat16, cache_dtype)
    arguments = (case.k_cache, case.v_cache, case.batch)
    exact = paged_attention_reference(case.query.float(), *arguments, scale=_SCALE)
    out = paged_attention(case.query, *arguments, scale=_SCALE, implementation=_OF_BFLOAT16)
    assert relative_rms(out, exact) < 2**0.5 * relative_rms(exact.bfloat16(), exact)


@pytest.mark.parametrize("query_len", [1, 3, 40])
def test_lengths_at_the_edges_of_partitions(query_len: int) -> None:
    seq_lens = [length for edge in (64, 128, 192, 256) for length in (edge - 1, edge, edge + 1)]
    case = paged_case([query_len] * len(seq_lens), seq_lens, 16, (8, 2), 64)
    for options in ({}, {"sliding_window": 64}, {"sinks": torch.linspace(-1, 4, 8)}):
        assert_all_equal_the_reference(case, options, (None, 1000, 128, 64, 63, 17))


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dtypes", [_SINGLE, _HALVES[1], _EIGHT_BITS[0]], ids=str)
def test_few_rows_do_not_depend_on_their_batch_or_on_threads(
    dtypes: tuple[torch.dtype, torch.dtype], window: int | None
) -> None:
    """Lengths of one, two and more partitions; a sequence alone is divided among threads."""
    query_lens, seq_lens = [1, 1, 3, 1, 1], [63, 128, 300, 1500, 127]
    case = paged_case(query_lens, seq_lens, 16, (8, 4), 64).to(*dtypes)
    batch, starts = case.batch, case.batch.query_start_loc.tolist()
    for implementation in implementations(dtypes[0]):
        if not implementation.is_cpp:
            continue

        def attend(
            first: int, end: int, num_threads: int, by: Implementation = implementation
        ) -> Tensor:
            query = case.query[starts[first] : starts[end]]
            rows = replace(
                batch,
                block_table=batch.block_table[first:end],
                query_start_loc=batch.query_start_loc[first : end + 1] - starts[first],
                seq_lens=batch.seq_lens[first:end],
            )
            with threads(num_threads):
                return paged_attention(
                    *(query, case.k_cache, case.v_cache, rows),
                    scale=_SCALE,
                    sliding_window=window,
                    implementation=by,
                )

        expected = attend(0, len(seq_lens), 1)
        for num_threads in (1, 2, 5):
            assert attend(0, len(seq_lens), num_threads).equal(expected)
            for seq in range(len(seq_lens)):
                alone = attend(seq, seq + 1, num_threads)
                assert alone.equal(expected[starts[seq] : starts[seq + 1]]), (seq, num_threads)


def test_a_few_long_sequences_are_partitioned_by_itself() -> None:
    assert_all_equal_the_reference(paged_case([1, 1], [3000, 40], 16, (8, 4), 64), {})


@pytest.mark.parametrize("dtypes", [_SINGLE, _HALVES[1], _EIGHT_BITS[0]], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [4, 20, 64])
def test_blocks_outside_the_window_are_not_read(
    window: int, head_dim: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = paged_case([1, 30, 1, 5], [200, 200, 64, 21], 8, (4, 2), head_dim)
    query_lens = case.batch.query_lens.tolist()
    for seq, seq_len in enumerate(case.batch.seq_lens.tolist()):
        first_seen = max(seq_len - query_lens[seq] + 1 - window, 0)
        for position in range(first_seen):
            block = case.batch.block_table[seq, position // 8]
            case.k_cache[block, position % 8] = torch.nan
            case.v_cache[block, position % 8] = torch.nan
    assert_all_equal_the_reference(case.to(*dtypes), {"sliding_window": window}, (None, 16))


@pytest.mark.parametrize("dtypes", [_SINGLE, *_HALVES, *_EIGHT_BITS], ids=str)
@pytest.mark.parametrize("window", [None, 4, 64])
def test_sequences_share_the_blocks_of_a_prefix(
    window: int | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    case = paged_case([4, 1, 60], [100, 90, 124], 16, (4, 2), 64)
    case.batch.block_table[1:, :4] = case.batch.block_table[0, :4]
    assert_all_equal_the_reference(case.to(*dtypes), {"sliding_window": window}, (None, 64))


@pytest.mark.parametrize("dtypes", [_SINGLE, _HALVES[1], _EIGHT_BITS[0]], ids=str)
@pytest.mark.parametrize("window", [4, 64])
@pytest.mark.slow
def test_rows_that_see_nothing_of_the_first_tile(
    window: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """The last queries of an item begin to see keys after its first tile, which is of 128. Whole,
    so that a running softmax begins with nothing; and in parts, of which some have nothing."""
    query_lens, seq_lens, heads, head_dim = [1000, 1], [1100, 9], (4, 4), 64
    if cpp_implementations():
        numbers = attention_items(
            query_lens, seq_lens, heads, head_dim, window, 0, torch.get_num_threads()
        )
        # Tokens of items that are not partitioned.
        wholes = [numbers[i + 4] for i in range(0, len(numbers), 10) if numbers[i + 8] == -1]
        assert max(wholes) > 128 + window
    case = paged_case(query_lens, seq_lens, 16, heads, head_dim).to(*dtypes)
    for sinks in (None, torch.linspace(-2, 3, 4)):
        options = {"sliding_window": window, "sinks": sinks}
        assert_all_equal_the_reference(case, options, (None, 64, 128))


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 3, 8)], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4, 64])
def test_empty_sequences_beside_partitioned_ones(
    window: int | None, sinks: torch.Tensor | None
) -> None:
    case = paged_case([1, 1, 0, 200, 3], [300, 0, 0, 200, 0], 16, (8, 2), 64)
    options = {"sliding_window": window, "sinks": sinks}
    assert_all_equal_the_reference(case, options, (None, 64, 128))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    case = paged_case([1, 1, 2, 3], [5, 0, 0, 9], 8, (4, 2), 64)
    for implementation in implementations():
        for sinks in (None, torch.zeros(4)):
            out = paged_attention(
                case.query,
                case.k_cache,
                case.v_cache,
                case.batch,
                scale=_SCALE,
                sinks=sinks,
                implementation=implementation,
            )
            assert out.isfinite().all()
            assert not out[1:4].any()
            assert out[0].all()
            assert out[4:].all()
    assert_all_equal_the_reference(case, {})


def test_a_batch_without_queries() -> None:
    case = paged_case([0, 0], [5, 0], 8)
    for implementation in implementations():
        out = paged_attention(
            case.query,
            case.k_cache,
            case.v_cache,
            case.batch,
            scale=_SCALE,
            implementation=implementation,
        )
        assert out.shape == (0, 6, 12)


@pytest.mark.parametrize("query_len", [1, 20])
def test_what_is_not_a_number_is_not_hidden(query_len: int) -> None:
    case = paged_case([query_len], [50], 8, (4, 2), 64)
    query = case.query.clone()
    query[-1, 0] = torch.nan
    for implementation in implementations():
        out = paged_attention(
            query,
            case.k_cache,
            case.v_cache,
            case.batch,
            scale=_SCALE,
            implementation=implementation,
        )
        assert out[-1, 0].isnan().all()
        assert out[-1, 1:].isfinite().all()


def test_queries_as_models_give_them() -> None:
    """Heads before tokens in memory."""
    case = paged_case([3, 1], [30, 9], 4)
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert_all_equal_the_reference(replace(case, query=query), {})


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn])
def test_heads_that_do_not_lie_side_by_side(cache_dtype: torch.dtype) -> None:
    case = paged_case(_QUERY_LENS, _SEQ_LENS, 16, (8, 2), 64).to(torch.float32, cache_dtype)
    apart = {
        name: torch.cat([cache.float(), torch.full_like(cache.float(), torch.nan)], -1).to(
            cache_dtype
        )[..., :64]
        for name, cache in (("k_cache", case.k_cache), ("v_cache", case.v_cache))
    }
    assert_all_equal_the_reference(replace(case, **apart), {}, (None, 64))


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_scores_of_any_size(scale: float) -> None:
    case = paged_case([1, 40], [100, 40], 8, (4, 2), 64)
    assert_all_equal_the_reference(replace(case, query=case.query * scale), {})


def test_a_block_that_is_not_there_is_refused() -> None:
    case = paged_case([1], [20], 8)
    case.batch.block_table[0, 1] = len(case.k_cache)
    for implementation in implementations():
        with pytest.raises(IndexError):
            paged_attention(
                case.query,
                case.k_cache,
                case.v_cache,
                case.batch,
                scale=_SCALE,
                implementation=implementation,
            )

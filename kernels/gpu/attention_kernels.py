"""Paged attention in Triton: online softmax over tiles of keys, in powers of two.

A tile's rows are query tokens times the query heads that share a key head, so that keys are read
once for all of them. Where a sequence's keys are cut into partitions, each program stores its
sums, maxima and totals, which `kernels.gpu.attention_merge` merges.
"""

import triton
import triton.language as tl

from kernels.gpu.attention_ranges import (
    first_tile,
    keys_all_see,
    partition_keys,
    queries_of,
    rows_of_tile,
    seen_keys,
    sequence_of,
)
from kernels.gpu.attention_tiles import LOG2_E, attend_keys, blocks_of_tile

# Changes of these from step to step must not cause another compilation.
_PER_STEP = [
    "num_seqs",
    "shortest_query",
    "longest_query",
    "fewest_keys",
    "num_partitions",
    "table_stride",
    "window",
]


@triton.jit(do_not_specialize=_PER_STEP)
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out,
    query,
    k_cache,
    v_cache,
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    partial_sums,
    partial_stats,
    num_seqs,
    shortest_query,
    longest_query,
    fewest_keys,
    num_partitions,
    scale,
    softcap,
    window,
    v_scale,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PARTITIONED: tl.constexpr,
):
    """Attention of one tile of queries, if its sequence has `shortest_query` to `longest_query` of
    them. The grid is (tiles of heads, tiles of queries, partitions): concurrent programs read all
    heads of a few slots, which are adjacent in memory. With ONE_TILE a sequence has one tile of
    queries, whose number is the sequence's.

    `partial_sums` is `[num_seqs, head tiles, partitions, TILE_ROWS, V_HEAD_DIM]`; `partial_stats`
    `[num_seqs, head tiles, partitions, 2, TILE_ROWS]` has maxima and totals. STRIDE_UNIT divides
    the strides of queries, keys, values and results.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // HEADS_PER_TILE
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    seq, first_token = _query_tile(query_start_loc, num_seqs, TILE_TOKENS, ONE_TILE)
    query_start, query_len = queries_of(query_start_loc, seq)
    if query_len < shortest_query or query_len > longest_query:
        return
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + TILE_TOKENS, seq_len) - 1
    first_key, begin, end = seen_keys(first_position, last_position, window, TILE_KEYS)
    partition = tl.program_id(2)
    if PARTITIONED:
        num_keys = partition_keys(end - begin, num_partitions, fewest_keys, TILE_KEYS)
        begin += partition * num_keys
        # The first partition counts the sink, even if it has no keys.
        if partition > 0 and begin >= end:
            return
        end = tl.minimum(begin + num_keys, end)

    # Loaded before the queries, so that the latencies overlap.
    table = block_table + seq.to(tl.int64) * table_stride
    blocks = blocks_of_tile(table, begin, end, BLOCK_SIZE, TILE_KEYS)
    head_tile = tl.program_id(0)
    kv_head = head_tile // HEAD_TILES
    rows = tl.arange(0, TILE_ROWS)
    heads, tokens, is_row = rows_of_tile(
        rows, head_tile, first_token, query_len, GROUP_SIZE, HEADS_PER_TILE, TILE_TOKENS
    )
    positions = seq_len - query_len + tokens
    flat_tokens = query_start.to(tl.int64) + tokens
    query_rows = _row_pointers(
        query, flat_tokens, heads, query_token_stride, query_head_stride, STRIDE_UNIT
    )
    queries = _load_queries(query_rows, is_row, HEAD_DIM, PADDED_DIM).to(COMPUTE_DTYPE)
    maxima, totals = _initial_softmax(sinks, heads, is_row, partition, TILE_ROWS, PARTITIONED)
    sums = tl.full([TILE_ROWS, PADDED_V_DIM], 0.0, tl.float32)

    keys = _cache_of_head(
        k_cache, kv_head, k_block_stride, k_slot_stride, k_head_stride, STRIDE_UNIT
    )
    values = _cache_of_head(
        v_cache, kv_head, v_block_stride, v_slot_stride, v_head_stride, STRIDE_UNIT
    )
    # Keys that all queries of the tile see need no masks; those before and after them do. With
    # ONE_TILE memory is the bottleneck, and all keys are masked: a single loop reads without a
    # pause.
    whole_begin, whole_end = begin, begin
    if not ONE_TILE:
        whole_begin, whole_end = keys_all_see(
            first_position, last_position, begin, end, window, TILE_KEYS
        )
    edges = (begin, whole_begin, whole_end, end)
    for part in tl.static_range(3):
        if part == 2 or (not ONE_TILE and (part == 1 or window is not None)):
            maxima, totals, sums, blocks = attend_keys(
                maxima,
                totals,
                sums,
                blocks,
                queries,
                positions,
                keys,
                values,
                table,
                edges[part],
                edges[part + 1],
                first_key,
                end,
                scale,
                softcap,
                window,
                HEAD_DIM,
                V_HEAD_DIM,
                BLOCK_SIZE,
                TILE_KEYS,
                PRECISION,
                part != 1,
            )

    if PARTITIONED:
        index = (seq.to(tl.int64) * tl.num_programs(0) + head_tile) * num_partitions + partition
        _store_partial(partial_sums, partial_stats, index, maxima, totals, sums, is_row, V_HEAD_DIM)
    else:
        # A row that sees no key has no total, and gets zeros.
        attended = sums * (v_scale / tl.where(totals == 0.0, 1.0, totals))[:, None]
        out_rows = _row_pointers(
            out, flat_tokens, heads, out_token_stride, out_head_stride, STRIDE_UNIT
        )
        _store_rows(out_rows, attended.to(out.dtype.element_ty), is_row, V_HEAD_DIM)


@triton.jit
def _row_pointers(tensor, tokens, heads, token_stride, head_stride, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to heads of tokens, in int64: models may pass heads before tokens, so that both
    strides may be large."""
    token_stride = _multiple_of(token_stride, UNIT)
    return tensor + tokens * token_stride + heads.to(tl.int64) * _multiple_of(head_stride, UNIT)


@triton.jit
def _cache_of_head(cache, head, block_stride, slot_stride, head_stride, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A key head of a cache: its pointer, its block stride and its slot stride."""
    pointer = cache + head.to(tl.int64) * _multiple_of(head_stride, UNIT)
    return pointer, _multiple_of(block_stride, UNIT), _multiple_of(slot_stride, UNIT)


@triton.jit
def _multiple_of(stride, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stride, as an expression that is visibly a multiple of UNIT. Triton detects only
    multiples of 16, and would load heads of 72 or 120 numbers one by one."""
    if UNIT > 1:
        stride = stride // UNIT * UNIT
    return stride


@triton.jit
def _query_tile(  # type: ignore[no-untyped-def]
    query_start_loc, num_seqs, TILE_TOKENS: tl.constexpr, ONE_TILE: tl.constexpr
):
    """The sequence of this program's tile of queries, and the first of the tile's tokens."""
    if ONE_TILE:
        seq = tl.program_id(1)
        first_token = 0
    else:
        # The last tiles see the most keys, so they are scheduled first.
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        seq = sequence_of(tile, query_start_loc, num_seqs, TILE_TOKENS)
        tile -= first_tile(query_start_loc, seq, TILE_TOKENS)
        first_token = tile * TILE_TOKENS
    return seq, first_token


@triton.jit
def _load_queries(rows, is_row, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    dims = tl.arange(0, PADDED_DIM)
    mask = is_row[:, None] & (dims < DIM)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _initial_softmax(  # type: ignore[no-untyped-def]
    sinks, heads, is_row, partition, TILE_ROWS: tl.constexpr, PARTITIONED: tl.constexpr
):
    """Maxima and totals of the rows before any key: those of the sinks, in the first partition."""
    maxima = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        maxima = tl.load(sinks + heads, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2_E
        if PARTITIONED:
            maxima = tl.where(partition == 0, maxima, float("-inf"))
    return maxima, tl.where(maxima == float("-inf"), 0.0, 1.0)


@triton.jit
def _store_partial(  # type: ignore[no-untyped-def]
    partial_sums, partial_stats, index, maxima, totals, sums, is_row, DIM: tl.constexpr
):
    """Store the results of a partition, the `index`-th of all."""
    TILE_ROWS: tl.constexpr = sums.shape[0]
    rows = tl.arange(0, TILE_ROWS)
    stats = partial_stats + index * 2 * TILE_ROWS + rows
    tl.store(stats, maxima, mask=is_row)
    tl.store(stats + TILE_ROWS, totals, mask=is_row)
    _store_rows(partial_sums + (index * TILE_ROWS + rows) * DIM, sums, is_row, DIM)


@triton.jit
def _store_rows(rows, numbers, is_row, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    dims = tl.arange(0, numbers.shape[1])
    mask = is_row[:, None] & (dims < DIM)[None, :]
    tl.store(rows[:, None] + dims[None, :], numbers, mask=mask)

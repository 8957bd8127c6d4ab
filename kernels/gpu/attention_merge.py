"""Merges the partitions of a sequence's keys, as in Flash-Decoding."""

import triton
import triton.language as tl

from kernels.gpu.attention_ranges import partition_keys, queries_of, rows_of_tile, seen_keys

# Partitions that are merged at once.
_MERGED = tl.constexpr(16)


@triton.jit(do_not_specialize=["longest_query", "fewest_keys", "num_partitions", "window"])
def merge_partitions_kernel(  # type: ignore[no-untyped-def]
    out,
    query_start_loc,
    seq_lens,
    partial_sums,
    partial_stats,
    longest_query,
    fewest_keys,
    num_partitions,
    window,
    v_scale,
    out_token_stride,
    out_head_stride,
    GROUP_SIZE: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PADDED_V_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Merge the partitions of one row of a tile. The grid is (tiles of heads, sequences, rows)."""
    TILE_TOKENS: tl.constexpr = TILE_ROWS // HEADS_PER_TILE
    head_tile, seq, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start, query_len = queries_of(query_start_loc, seq)
    head, token, is_row = rows_of_tile(
        row, head_tile, 0, query_len, GROUP_SIZE, HEADS_PER_TILE, TILE_TOKENS
    )
    if query_len > longest_query or not is_row:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    first_position = seq_len - query_len
    last_position = tl.minimum(first_position + TILE_TOKENS, seq_len) - 1
    _, begin, end = seen_keys(first_position, last_position, window, TILE_KEYS)
    num_keys = partition_keys(end - begin, num_partitions, fewest_keys, TILE_KEYS)
    num_written = tl.maximum(tl.cdiv(end - begin, num_keys), 1)

    index = (seq.to(tl.int64) * tl.num_programs(0) + head_tile) * num_partitions
    dims = tl.arange(0, PADDED_V_DIM)
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.full([PADDED_V_DIM], 0.0, tl.float32)
    for first in range(0, num_written, _MERGED):
        parts = first + tl.arange(0, _MERGED)
        written = parts < num_written
        stats = partial_stats + (index + parts) * 2 * TILE_ROWS + row
        maxima = tl.load(stats, mask=written, other=float("-inf"))
        totals = tl.load(stats + TILE_ROWS, mask=written, other=0.0)
        sum_rows = partial_sums + ((index + parts) * TILE_ROWS + row) * V_HEAD_DIM
        mask = written[:, None] & (dims < V_HEAD_DIM)[None, :]
        part_sums = tl.load(sum_rows[:, None] + dims[None, :], mask=mask, other=0.0)
        larger = tl.maximum(maximum, tl.max(maxima, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(maxima - base)
        fade = tl.exp2(maximum - base)
        total = total * fade + tl.sum(totals * weights, 0)
        sums = sums * fade + tl.sum(part_sums * weights[:, None], 0)
        maximum = larger
    attended = sums * (v_scale / tl.where(total == 0.0, 1.0, total))
    token = query_start.to(tl.int64) + token
    out += token * out_token_stride + head.to(tl.int64) * out_head_stride
    tl.store(out + dims, attended.to(out.dtype.element_ty), mask=dims < V_HEAD_DIM)

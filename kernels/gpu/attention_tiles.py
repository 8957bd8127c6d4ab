"""Device functions for attention to tiles of keys: online softmax, in powers of two."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(  # type: ignore[no-untyped-def]
    maxima,
    totals,
    sums,
    blocks,
    queries,
    positions,
    keys,
    values,
    table,
    begin,
    end,
    first_key,
    last_end,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys from `begin`, a multiple of TILE_KEYS, to `end`: returns the rows' updated
    maxima, totals and sums. `blocks` are those of the first tile; returns those of the tile after
    the last one. `keys` and `values` are each the head's pointer, block stride and slot stride.

    MASKED reads nothing before `first_key` or from `last_end` on, and hides keys that a row's
    position does not see; without it, all rows see all keys.
    """
    PADDED_DIM: tl.constexpr = queries.shape[1]
    PADDED_V_DIM: tl.constexpr = sums.shape[1]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    v_dims = tl.arange(0, PADDED_V_DIM)[None, :]
    IS_ADJUSTED: tl.constexpr = MASKED or softcap is not None
    for first in range(begin, end, TILE_KEYS):
        numbers = first + tl.arange(0, TILE_KEYS)
        k_rows = _rows(keys, blocks, numbers % BLOCK_SIZE)
        v_rows = _rows(values, blocks, numbers % BLOCK_SIZE)
        # A tile's blocks are looked up one tile ahead: its keys do not wait for the table, and the
        # compiler pipelines their loads as if they were contiguous.
        blocks = blocks_of_tile(table, first + TILE_KEYS, last_end, BLOCK_SIZE, TILE_KEYS)
        is_read = (numbers >= first_key) & (numbers < last_end)
        key_tile = _load_rows(k_rows, dims, is_read, HEAD_DIM, PADDED_DIM, MASKED)
        value_tile = _load_rows(v_rows, v_dims, is_read, V_HEAD_DIM, PADDED_V_DIM, MASKED)
        key_tile = key_tile.to(queries.dtype)
        value_tile = value_tile.to(queries.dtype)

        scores = tl.dot(queries, tl.trans(key_tile), input_precision=PRECISION)
        if IS_ADJUSTED:
            scores = _adjusted(scores, numbers, positions, scale, softcap, window, MASKED)
        weights, fade, maxima = _softmax(scores, maxima, scale * LOG2_E, IS_ADJUSTED)
        totals = totals * fade + tl.sum(weights, 1)
        weights = weights.to(queries.dtype)
        sums = tl.dot(weights, value_tile, sums * fade[:, None], input_precision=PRECISION)
    return maxima, totals, sums, blocks


@triton.jit
def blocks_of_tile(  # type: ignore[no-untyped-def]
    table, first, last_end, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr
):
    """The block of each key of a tile, or the block of the whole tile."""
    numbers = first
    if BLOCK_SIZE % TILE_KEYS != 0:
        numbers = first + tl.arange(0, TILE_KEYS)
    blocks = tl.load(table + numbers // BLOCK_SIZE, mask=numbers < last_end, other=0)
    return blocks.to(tl.int64)


@triton.jit
def _rows(cache, blocks, slots):  # type: ignore[no-untyped-def]
    """Pointers to a tile's keys or values."""
    pointer, block_stride, slot_stride = cache
    return (pointer + blocks * block_stride + slots * slot_stride)[:, None]


@triton.jit
def _load_rows(  # type: ignore[no-untyped-def]
    rows, dims, is_read, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASKED: tl.constexpr
):
    if MASKED:
        # Unseen numbers may be NaN, and NaN times a weight of 0 is NaN.
        loaded = tl.load(rows + dims, mask=is_read[:, None] & (dims < DIM), other=0.0)
    elif DIM == PADDED_DIM:
        loaded = tl.load(rows + dims)
    else:
        loaded = tl.load(rows + dims, mask=dims < DIM, other=0.0)
    return loaded


@triton.jit
def _adjusted(  # type: ignore[no-untyped-def]
    scores, numbers, positions, scale, softcap, window, MASKED: tl.constexpr
):
    """Final scores times LOG2_E; with MASKED -inf for keys that a row does not see."""
    if softcap is not None:
        scores = softcap * _tanh(scores * scale / softcap)
        scores *= LOG2_E
    else:
        scores *= scale * LOG2_E
    if MASKED:
        visible = numbers[None, :] <= positions[:, None]
        if window is not None:
            visible = visible & (numbers[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _softmax(scores, maxima, exponent_scale, IS_ADJUSTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of a tile's keys, the factor for earlier sums and totals, and the new maxima."""
    if IS_ADJUSTED:
        larger = tl.maximum(maxima, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
    else:
        # The multiplication is fused with the subtraction.
        larger = tl.maximum(maxima, tl.max(scores, 1) * exponent_scale)
        base = larger
        weights = tl.exp2(scores * exponent_scale - base[:, None])
    return weights, tl.exp2(maxima - base), larger


@triton.jit
def _tanh(numbers):  # type: ignore[no-untyped-def]
    return 1.0 - 2.0 / (tl.exp2(numbers * (2.0 * LOG2_E)) + 1.0)

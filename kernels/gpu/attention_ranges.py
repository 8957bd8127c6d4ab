"""Device functions that divide a batch's queries into tiles and its keys into ranges."""

import triton
import triton.language as tl


@triton.jit
def first_tile(query_start_loc, seq, TILE_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first tile of a sequence. Each sequence gets one tile more than its queries may need, so
    that the tile follows from the start of its queries alone."""
    return tl.load(query_start_loc + seq).to(tl.int32) // TILE_TOKENS + seq


@triton.jit
def sequence_of(tile, query_start_loc, num_seqs, TILE_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last sequence whose first tile is not after `tile`."""
    below = 0
    above = num_seqs
    while above - below > 1:
        middle = (below + above) // 2
        if first_tile(query_start_loc, middle, TILE_TOKENS) <= tile:
            below = middle
        else:
            above = middle
    return below


@triton.jit
def queries_of(query_start_loc, seq):  # type: ignore[no-untyped-def]
    """The first token of a sequence's queries in the batch, and their number."""
    start = tl.load(query_start_loc + seq)
    return start, (tl.load(query_start_loc + seq + 1) - start).to(tl.int32)


@triton.jit
def rows_of_tile(  # type: ignore[no-untyped-def]
    rows,
    head_tile,
    first_token,
    query_len,
    GROUP_SIZE: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """The query head and the token of each row, and whether they exist."""
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    head_in_group = head_tile % HEAD_TILES * HEADS_PER_TILE + rows % HEADS_PER_TILE
    heads = head_tile // HEAD_TILES * GROUP_SIZE + head_in_group
    tokens = first_token + rows // HEADS_PER_TILE
    is_row = (tokens < query_len) & (head_in_group < GROUP_SIZE)
    is_row = is_row & (rows < TILE_TOKENS * HEADS_PER_TILE)
    return heads, tokens, is_row


@triton.jit
def seen_keys(first_position, last_position, window, TILE_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key that queries at these positions see, the start of its tile, and the end."""
    end = tl.maximum(last_position + 1, 0)
    first_key = tl.minimum(end, 0)
    if window is not None:
        first_key = tl.maximum(first_position - window + 1, 0)
    return first_key, first_key // TILE_KEYS * TILE_KEYS, end


@triton.jit
def keys_all_see(  # type: ignore[no-untyped-def]
    first_position, last_position, begin, end, window, TILE_KEYS: tl.constexpr
):
    """Start and end of the whole tiles of keys that every query of the tile sees."""
    whole_begin = begin
    if window is not None:
        first_of_last = tl.maximum(last_position - window + 1, 0)
        whole_begin = tl.minimum(tl.cdiv(first_of_last, TILE_KEYS) * TILE_KEYS, end)
    whole_end = tl.maximum(first_position + 1, 0) // TILE_KEYS * TILE_KEYS
    return whole_begin, tl.maximum(whole_begin, whole_end)


@triton.jit
def partition_keys(num_keys, num_partitions, fewest_keys, TILE_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of keys of a sequence's partitions, a multiple of TILE_KEYS."""
    tiles = tl.cdiv(tl.cdiv(num_keys, num_partitions), TILE_KEYS)
    return tl.maximum(tiles * TILE_KEYS, fewest_keys)

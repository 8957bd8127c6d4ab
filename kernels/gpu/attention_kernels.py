"""Paged attention in Triton: online softmax over tiles of keys, in powers of two.

A tile's rows are query tokens times the query heads that share a key head, so that keys are read
once for all of them. Where a sequence's keys are cut into partitions, each program leaves its
sums, maxima and totals, which a second kernel merges (as in Flash-Decoding).
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# Partitions that are merged at once.
_MERGED = tl.constexpr(16)

# What changes from step to step must not lead to another compilation.
_OF_A_STEP = [
    "num_seqs",
    "shortest_query",
    "longest_query",
    "fewest_keys",
    "num_partitions",
    "table_stride",
    "window",
]


@triton.jit(do_not_specialize=_OF_A_STEP)  # type: ignore[untyped-decorator]
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out,
    query,
    k_cache,
    v_cache,
    block_table,
    query_start_loc,
    seq_lens,
    sinks,
    alibi_slopes,
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
    GROUP_SIZE: tl.constexpr,  # noqa: N803
    HEADS_PER_TILE: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    V_HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
    PADDED_V_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_KEYS: tl.constexpr,  # noqa: N803
    STRIDE_UNIT: tl.constexpr,  # noqa: N803
    COMPUTE_DTYPE: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    ONE_TILE: tl.constexpr,  # noqa: N803
    PARTITIONED: tl.constexpr,  # noqa: N803
):
    """Attention of one tile of queries, if its sequence has `shortest_query` to `longest_query` of
    them. The grid is (tiles of heads, tiles of queries, partitions): what runs at once reads all
    heads of a few slots, which lie beside each other. With ONE_TILE a sequence has one tile of
    queries, and its number is the sequence's.

    `partial_sums` is `[num_seqs, head tiles, partitions, TILE_ROWS, V_HEAD_DIM]`; `partial_stats`
    `[num_seqs, head tiles, partitions, 2, TILE_ROWS]` has maxima and totals. STRIDE_UNIT divides
    the strides of queries, keys, values and results.
    """
    if STRIDE_UNIT > 1:
        # The compiler learns by itself whether a stride is a multiple of 16, and of nothing else.
        # Without it, it would read heads of 72 or 120 numbers one by one.
        out_token_stride = out_token_stride // STRIDE_UNIT * STRIDE_UNIT
        out_head_stride = out_head_stride // STRIDE_UNIT * STRIDE_UNIT
        query_token_stride = query_token_stride // STRIDE_UNIT * STRIDE_UNIT
        query_head_stride = query_head_stride // STRIDE_UNIT * STRIDE_UNIT
        k_block_stride = k_block_stride // STRIDE_UNIT * STRIDE_UNIT
        k_slot_stride = k_slot_stride // STRIDE_UNIT * STRIDE_UNIT
        k_head_stride = k_head_stride // STRIDE_UNIT * STRIDE_UNIT
        v_block_stride = v_block_stride // STRIDE_UNIT * STRIDE_UNIT
        v_slot_stride = v_slot_stride // STRIDE_UNIT * STRIDE_UNIT
        v_head_stride = v_head_stride // STRIDE_UNIT * STRIDE_UNIT
    TILE_TOKENS: tl.constexpr = TILE_ROWS // HEADS_PER_TILE  # noqa: N806
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + HEADS_PER_TILE - 1) // HEADS_PER_TILE  # noqa: N806
    if ONE_TILE:
        seq = tl.program_id(1)
        first_token = 0
    else:
        # Late tiles see the most keys: they begin first.
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        seq = _sequence_of(tile, query_start_loc, num_seqs, TILE_TOKENS)
        tile -= _first_tile(query_start_loc, seq, TILE_TOKENS)
        first_token = tile * TILE_TOKENS
    query_start = tl.load(query_start_loc + seq)
    query_len = (tl.load(query_start_loc + seq + 1) - query_start).to(tl.int32)
    if query_len < shortest_query or query_len > longest_query:
        return
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + TILE_TOKENS, seq_len) - 1
    first_key, begin, end = _seen_keys(first_position, last_position, window, TILE_KEYS)
    partition = tl.program_id(2)
    if PARTITIONED:
        num_keys = _partition_keys(end - begin, num_partitions, fewest_keys, TILE_KEYS)
        begin += partition * num_keys
        # The first one counts the sink, whether it has keys or not.
        if partition > 0 and begin >= end:
            return
        end = tl.minimum(begin + num_keys, end)

    # Looked up before the queries are waited for.
    table = block_table + seq.to(tl.int64) * table_stride
    blocks = _blocks_of_tile(table, begin, end, BLOCK_SIZE, TILE_KEYS)
    head_tile = tl.program_id(0)
    kv_head = head_tile // HEAD_TILES
    rows = tl.arange(0, TILE_ROWS)
    head_in_group = head_tile % HEAD_TILES * HEADS_PER_TILE + rows % HEADS_PER_TILE
    heads = kv_head * GROUP_SIZE + head_in_group
    tokens = first_token + rows // HEADS_PER_TILE
    positions = seq_len - query_len + tokens
    is_row = (tokens < query_len) & (head_in_group < GROUP_SIZE)
    is_row = is_row & (rows < TILE_TOKENS * HEADS_PER_TILE)
    flat_tokens = query_start.to(tl.int64) + tokens

    dims = tl.arange(0, PADDED_DIM)
    # Models give heads before tokens: the strides of both may be large.
    wide_heads = heads.to(tl.int64)
    query_rows = query + flat_tokens * query_token_stride + wide_heads * query_head_stride
    query_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(query_rows[:, None] + dims[None, :], mask=query_mask, other=0.0)
    queries = queries.to(COMPUTE_DTYPE)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=is_row, other=0.0).to(tl.float32)
    maxima = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        maxima = tl.load(sinks + heads, mask=is_row, other=float("-inf")).to(tl.float32) * _LOG2_E
        if PARTITIONED:
            maxima = tl.where(partition == 0, maxima, float("-inf"))
    totals = tl.where(maxima == float("-inf"), 0.0, 1.0)
    sums = tl.full([TILE_ROWS, PADDED_V_DIM], 0.0, tl.float32)

    keys = k_cache + kv_head.to(tl.int64) * k_head_stride
    values = v_cache + kv_head.to(tl.int64) * v_head_stride
    # Keys that all queries of the tile see need no masks; before and behind them there are edges.
    # With ONE_TILE, time is memory's, and all is edge: a single loop, whose reads never pause.
    whole_begin, whole_end = begin, begin
    if not ONE_TILE:
        whole_begin, whole_end = _keys_all_see(
            first_position, last_position, begin, end, window, TILE_KEYS
        )
    for part in tl.static_range(3):
        if part == 0:
            part_begin, part_end = begin, whole_begin
        elif part == 1:
            part_begin, part_end = whole_begin, whole_end
        else:
            part_begin, part_end = whole_end, end
        if part == 2 or (not ONE_TILE and (part == 1 or window is not None)):
            maxima, totals, sums, blocks = _attend(
                maxima,
                totals,
                sums,
                blocks,
                queries,
                keys,
                values,
                table,
                part_begin,
                part_end,
                first_key,
                end,
                positions,
                slopes,
                scale,
                softcap,
                window,
                k_block_stride,
                k_slot_stride,
                v_block_stride,
                v_slot_stride,
                HEAD_DIM,
                V_HEAD_DIM,
                PADDED_DIM,
                PADDED_V_DIM,
                BLOCK_SIZE,
                TILE_KEYS,
                PRECISION,
                part != 1,
            )

    v_dims = tl.arange(0, PADDED_V_DIM)
    out_mask = is_row[:, None] & (v_dims < V_HEAD_DIM)[None, :]
    if PARTITIONED:
        index = (seq.to(tl.int64) * tl.num_programs(0) + head_tile) * num_partitions + partition
        stats = partial_stats + index * 2 * TILE_ROWS + rows
        tl.store(stats, maxima, mask=is_row)
        tl.store(stats + TILE_ROWS, totals, mask=is_row)
        sum_rows = partial_sums + (index * TILE_ROWS + rows) * V_HEAD_DIM
        tl.store(sum_rows[:, None] + v_dims[None, :], sums, mask=out_mask)
    else:
        # Who sees nothing has no total, and gets zeros.
        attended = sums * (v_scale / tl.where(totals == 0.0, 1.0, totals))[:, None]
        out_rows = out + flat_tokens * out_token_stride + wide_heads * out_head_stride
        attended = attended.to(out.dtype.element_ty)
        tl.store(out_rows[:, None] + v_dims[None, :], attended, mask=out_mask)


@triton.jit(do_not_specialize=_OF_A_STEP)  # type: ignore[untyped-decorator]
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
    GROUP_SIZE: tl.constexpr,  # noqa: N803
    HEADS_PER_TILE: tl.constexpr,  # noqa: N803
    V_HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_V_DIM: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_KEYS: tl.constexpr,  # noqa: N803
):
    """Merges the partitions of one row of a tile. The grid is (tiles of heads, sequences, rows)."""
    TILE_TOKENS: tl.constexpr = TILE_ROWS // HEADS_PER_TILE  # noqa: N806
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + HEADS_PER_TILE - 1) // HEADS_PER_TILE  # noqa: N806
    head_tile, seq, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_start = tl.load(query_start_loc + seq)
    query_len = (tl.load(query_start_loc + seq + 1) - query_start).to(tl.int32)
    token = row // HEADS_PER_TILE
    head_in_group = head_tile % HEAD_TILES * HEADS_PER_TILE + row % HEADS_PER_TILE
    if token >= query_len or query_len > longest_query or head_in_group >= GROUP_SIZE:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    first_position = seq_len - query_len
    last_position = tl.minimum(first_position + TILE_TOKENS, seq_len) - 1
    _, begin, end = _seen_keys(first_position, last_position, window, TILE_KEYS)
    num_keys = _partition_keys(end - begin, num_partitions, fewest_keys, TILE_KEYS)
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
    head = (head_tile // HEAD_TILES * GROUP_SIZE + head_in_group).to(tl.int64)
    out += (query_start.to(tl.int64) + token) * out_token_stride + head * out_head_stride
    tl.store(out + dims, attended.to(out.dtype.element_ty), mask=dims < V_HEAD_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _first_tile(query_start_loc, seq, TILE_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Of a sequence, if each gets one tile more than its queries may need: so all is known from
    where it starts."""
    return tl.load(query_start_loc + seq).to(tl.int32) // TILE_TOKENS + seq


@triton.jit  # type: ignore[untyped-decorator]
def _sequence_of(tile, query_start_loc, num_seqs, TILE_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The last sequence whose first tile is not behind `tile`."""
    below = 0
    above = num_seqs
    while above - below > 1:
        middle = (below + above) // 2
        if _first_tile(query_start_loc, middle, TILE_TOKENS) <= tile:
            below = middle
        else:
            above = middle
    return below


@triton.jit  # type: ignore[untyped-decorator]
def _seen_keys(first_position, last_position, window, TILE_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The first key that queries at these positions see, the begin of its tile, and the end."""
    end = tl.maximum(last_position + 1, 0)
    first_key = tl.minimum(end, 0)
    if window is not None:
        first_key = tl.maximum(first_position - window + 1, 0)
    return first_key, first_key // TILE_KEYS * TILE_KEYS, end


@triton.jit  # type: ignore[untyped-decorator]
def _keys_all_see(  # type: ignore[no-untyped-def]
    first_position,
    last_position,
    begin,
    end,
    window,
    TILE_KEYS: tl.constexpr,  # noqa: N803
):
    """Begin and end of the whole tiles of keys that every query of the tile sees."""
    whole_begin = begin
    if window is not None:
        first_of_last = tl.maximum(last_position - window + 1, 0)
        whole_begin = tl.minimum(tl.cdiv(first_of_last, TILE_KEYS) * TILE_KEYS, end)
    whole_end = tl.maximum(first_position + 1, 0) // TILE_KEYS * TILE_KEYS
    return whole_begin, tl.maximum(whole_begin, whole_end)


@triton.jit  # type: ignore[untyped-decorator]
def _partition_keys(num_keys, num_partitions, fewest_keys, TILE_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Keys of each partition of a sequence: whole tiles."""
    tiles = tl.cdiv(tl.cdiv(num_keys, num_partitions), TILE_KEYS)
    return tl.maximum(tiles * TILE_KEYS, fewest_keys)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    maxima,
    totals,
    sums,
    blocks,
    queries,
    keys,
    values,
    table,
    begin,
    end,
    first_key,
    last_end,
    positions,
    slopes,
    scale,
    softcap,
    window,
    k_block_stride,
    k_slot_stride,
    v_block_stride,
    v_slot_stride,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    V_HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
    PADDED_V_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE_KEYS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    MASKED: tl.constexpr,  # noqa: N803
):
    """Adds the keys from `begin`, a tile's, to `end`: maxima, totals and sums of the tile's rows.
    `blocks` are those of the first tile; those of the tile behind the last one come back.

    MASKED reads nothing before `first_key` or from `last_end` on, and hides what a row's position
    does not see; without it, all rows see all keys.
    """
    dims = tl.arange(0, PADDED_DIM)[None, :]
    v_dims = tl.arange(0, PADDED_V_DIM)[None, :]
    exponent_scale = scale * _LOG2_E
    for first in range(begin, end, TILE_KEYS):
        numbers = first + tl.arange(0, TILE_KEYS)
        slots = numbers % BLOCK_SIZE
        k_rows = (keys + blocks * k_block_stride + slots * k_slot_stride)[:, None]
        v_rows = (values + blocks * v_block_stride + slots * v_slot_stride)[:, None]
        # A tile's blocks are looked up one tile ahead: then its keys do not wait for the table, and
        # the compiler fetches them as early as if they lay in one piece.
        blocks = _blocks_of_tile(table, first + TILE_KEYS, last_end, BLOCK_SIZE, TILE_KEYS)
        if MASKED:
            is_read = (numbers >= first_key) & (numbers < last_end)
            # What is not seen may be NaN, which a weight of 0 does not silence.
            k_mask = is_read[:, None] & (dims < HEAD_DIM)
            v_mask = is_read[:, None] & (v_dims < V_HEAD_DIM)
            key_tile = tl.load(k_rows + dims, mask=k_mask, other=0.0)
            value_tile = tl.load(v_rows + v_dims, mask=v_mask, other=0.0)
        else:
            key_tile = _load_rows(k_rows, dims, HEAD_DIM, PADDED_DIM)
            value_tile = _load_rows(v_rows, v_dims, V_HEAD_DIM, PADDED_V_DIM)
        key_tile = key_tile.to(queries.dtype)
        value_tile = value_tile.to(queries.dtype)

        scores = tl.dot(queries, tl.trans(key_tile), input_precision=PRECISION)
        if softcap is not None or slopes is not None:
            scores *= scale
            if softcap is not None:
                scores = softcap * _tanh(scores / softcap)
            if slopes is not None:
                distances = (numbers[None, :] - positions[:, None]).to(tl.float32)
                scores += slopes[:, None] * distances
            scores *= _LOG2_E
        elif MASKED:
            scores *= exponent_scale
        if MASKED:
            visible = numbers[None, :] <= positions[:, None]
            if window is not None:
                visible = visible & (numbers[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        if MASKED or softcap is not None or slopes is not None:
            larger = tl.maximum(maxima, tl.max(scores, 1))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp2(scores - base[:, None])
        else:
            # The multiplication becomes part of the subtraction.
            larger = tl.maximum(maxima, tl.max(scores, 1) * exponent_scale)
            base = larger
            weights = tl.exp2(scores * exponent_scale - base[:, None])
        fade = tl.exp2(maxima - base)
        totals = totals * fade + tl.sum(weights, 1)
        weights = weights.to(queries.dtype)
        sums = tl.dot(weights, value_tile, sums * fade[:, None], input_precision=PRECISION)
        maxima = larger
    return maxima, totals, sums, blocks


@triton.jit  # type: ignore[untyped-decorator]
def _blocks_of_tile(  # type: ignore[no-untyped-def]
    table,
    first,
    last_end,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    TILE_KEYS: tl.constexpr,  # noqa: N803
):
    """Of each key of the tile, or the only one in which it lies."""
    numbers = first
    if BLOCK_SIZE % TILE_KEYS != 0:
        numbers = first + tl.arange(0, TILE_KEYS)
    blocks = tl.load(table + numbers // BLOCK_SIZE, mask=numbers < last_end, other=0)
    return blocks.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(rows, dims, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    if DIM == PADDED_DIM:
        loaded = tl.load(rows + dims)
    else:
        loaded = tl.load(rows + dims, mask=dims < DIM, other=0.0)
    return loaded


@triton.jit
def _tanh(numbers):  # type: ignore[no-untyped-def]
    return 1.0 - 2.0 / (tl.exp2(numbers * (2.0 * _LOG2_E)) + 1.0)

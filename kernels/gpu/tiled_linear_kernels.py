"""The kernels of products with tiled weights.

Weights are the left factor, `[outputs, inputs]`, so that they go from memory through registers,
where they are converted, to the tensor cores, and few rows do not waste these. Values are
multiplied as integers, which 16 bits represent exactly; a group's sum is then multiplied by its
scale.
"""

import triton
import triton.language as tl

from kernels.gpu.packed.int4 import high_halves, low_halves


@triton.jit(do_not_specialize=["num_rows"])
def tiled_linear_kernel(  # type: ignore[no-untyped-def]
    rows,
    tiles,
    scales,
    offsets,
    bias,
    out,
    sums,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    num_tiles,
    tiles_per_split,
    BITS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STEPS_PER_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    rows += row.to(tl.int64)[:, None] * row_stride
    is_row = row < num_rows
    if SPLITS == 1 or sums is not None:
        total = _sum_of_tiles(
            rows, is_row, tiles, scales, offsets, output, num_outputs, num_inputs,
            tl.program_id(2), num_tiles, tiles_per_split, BITS, HAS_GROUPS, GROUP_SIZE,
            STEPS_PER_GROUP, PRECISION, TILE_ROWS, TILE_OUTPUTS, STEP,
        )  # fmt: skip
    else:
        total = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
        for split in range(SPLITS):
            total += _sum_of_tiles(
                rows, is_row, tiles, scales, offsets, output, num_outputs, num_inputs,
                split, num_tiles, tiles_per_split, BITS, HAS_GROUPS, GROUP_SIZE,
                STEPS_PER_GROUP, PRECISION, TILE_ROWS, TILE_OUTPUTS, STEP,
            )  # fmt: skip
    written = is_row[:, None] & (output < num_outputs)[None, :]
    if sums is None:
        _store(tl.trans(total), bias, out, row, output, num_outputs, written)
    else:
        row += tl.program_id(2) * num_rows
        _store(tl.trans(total), None, sums, row, output, num_outputs, written)


@triton.jit
def _sum_of_tiles(  # type: ignore[no-untyped-def]
    rows,
    is_row,
    tiles,
    scales,
    offsets,
    output,
    num_outputs,
    num_inputs,
    split,
    num_tiles,
    tiles_per_split,
    BITS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STEPS_PER_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The sums `[outputs, rows]` over the tiles of a split."""
    DTYPE: tl.constexpr = rows.dtype.element_ty
    # A step of 4 bits is multiplied as 16 times its values, which takes one operation less.
    FACTOR: tl.constexpr = 0.0625 if BITS == 4 else 1.0
    # Both steps of a byte belong to one group, whose sum they share.
    SHARED: tl.constexpr = BITS == 4 and (STEPS_PER_GROUP % 2 == 0 or not HAS_GROUPS)
    STEPS: tl.constexpr = 2 if BITS == 4 else 1
    # Scales are loaded a tile ahead, as only what is multiplied on tensor cores is fetched by the
    # compiler's pipeline. More rows have other work meanwhile, and need the registers.
    IS_AHEAD: tl.constexpr = HAS_GROUPS and TILE_ROWS <= 16
    is_output = output < num_outputs
    num_groups = num_inputs // GROUP_SIZE if HAS_GROUPS else 1
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_tiles)
    sums = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    row_sums = tl.zeros([TILE_ROWS], tl.float32)
    tiles = _first_tile(tiles, first, output, num_outputs, STEP)
    if IS_AHEAD:
        next_scale, next_offset = _scales_of_group(
            scales, offsets, output, is_output, num_outputs, first * STEPS // STEPS_PER_GROUP,
            num_groups,
        )  # fmt: skip
    for tile in range(first, last):
        values = tl.load(tiles, mask=is_output[:, None], other=0)
        tiles += num_outputs * STEP
        low = low_halves(values, DTYPE) if BITS == 4 else values.to(DTYPE)
        step = tile * STEPS
        numbers = _inputs(
            rows, is_row, step, num_inputs, HAS_GROUPS, GROUP_SIZE, STEPS_PER_GROUP, STEP
        )
        if HAS_GROUPS:
            if IS_AHEAD:
                scale, offset = next_scale, next_offset
                next_scale, next_offset = _scales_of_group(
                    scales, offsets, output, is_output, num_outputs,
                    (step + STEPS) // STEPS_PER_GROUP, num_groups,
                )  # fmt: skip
            part = tl.dot(low, tl.trans(numbers), input_precision=PRECISION)
            row_part = _row_sums(numbers, offsets)
            if not SHARED:
                if not IS_AHEAD:
                    scale, offset = _scales_of_group(
                        scales, offsets, output, is_output, num_outputs,
                        step // STEPS_PER_GROUP, num_groups,
                    )  # fmt: skip
                sums = _add_group(sums, part, row_part, scale, offset, offsets, BITS, FACTOR)
                part = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
                row_part = tl.zeros([TILE_ROWS], tl.float32)
            if BITS == 4:
                step += 1
                if not SHARED:
                    scale, offset = _scales_of_group(
                        scales, offsets, output, is_output, num_outputs,
                        step // STEPS_PER_GROUP, num_groups,
                    )  # fmt: skip
                numbers = _inputs(
                    rows, is_row, step, num_inputs, HAS_GROUPS, GROUP_SIZE, STEPS_PER_GROUP, STEP
                )
                high = high_halves(values, DTYPE)
                part = tl.dot(high, tl.trans(numbers), part, input_precision=PRECISION)
                row_part += _row_sums(numbers, offsets)
            if SHARED or BITS == 4:
                if SHARED and not IS_AHEAD:
                    scale, offset = _scales_of_group(
                        scales, offsets, output, is_output, num_outputs,
                        step // STEPS_PER_GROUP, num_groups,
                    )  # fmt: skip
                sums = _add_group(sums, part, row_part, scale, offset, offsets, BITS, FACTOR)
        else:
            sums = tl.dot(low, tl.trans(numbers), sums, input_precision=PRECISION)
            row_part = _row_sums(numbers, offsets)
            if BITS == 4:
                numbers = _inputs(
                    rows,
                    is_row,
                    step + 1,
                    num_inputs,
                    HAS_GROUPS,
                    GROUP_SIZE,
                    STEPS_PER_GROUP,
                    STEP,
                )
                high = high_halves(values, DTYPE)
                sums = tl.dot(high, tl.trans(numbers), sums, input_precision=PRECISION)
                row_part += _row_sums(numbers, offsets)
            # Added once per pass: Triton 3.6 fails to compile two sums onto one carried value.
            row_sums += row_part
    if not HAS_GROUPS:
        scale, offset = _scales_of_group(
            scales, offsets, output, is_output, num_outputs, 0, num_groups
        )
        sums = _add_group(
            tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32), sums, row_sums, scale, offset, offsets,
            BITS, FACTOR,
        )  # fmt: skip
    return sums


@triton.jit
def _first_tile(tiles, first, output, num_outputs, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to the values `[outputs, STEP]` of the tile `first`. 64 bits: a large weight has
    more than 2^31 bytes."""
    place = (first.to(tl.int64) * num_outputs + output) * STEP
    return tiles + place[:, None] + tl.arange(0, STEP)[None, :]


@triton.jit
def _inputs(  # type: ignore[no-untyped-def]
    rows,
    is_row,
    step,
    num_inputs,
    HAS_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STEPS_PER_GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    """The inputs `[rows, STEP]` of a step; 0 where its columns are padding."""
    if HAS_GROUPS and GROUP_SIZE % STEP != 0:
        places = (step % STEPS_PER_GROUP) * STEP + tl.arange(0, STEP)
        column = (step // STEPS_PER_GROUP) * GROUP_SIZE + places
        inside = (places < GROUP_SIZE) & (column < num_inputs)
    else:
        column = step * STEP + tl.arange(0, STEP)
        inside = column < num_inputs
    return tl.load(rows + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)


@triton.jit
def _row_sums(numbers, offsets):  # type: ignore[no-untyped-def]
    """The sums of rows, where offsets need them."""
    if offsets is None:
        sums = tl.zeros([numbers.shape[0]], tl.float32)
    else:
        sums = tl.sum(numbers.to(tl.float32), 1)
    return sums


@triton.jit
def _scales_of_group(  # type: ignore[no-untyped-def]
    scales, offsets, output, is_output, num_outputs, group, num_groups
):
    """A group's scales and offsets `[outputs]`; zeros behind the last group. Without
    offsets the second are the scales, too."""
    place = group * num_outputs + output
    inside = is_output & (place < num_groups * num_outputs)
    scale = tl.load(scales + place, mask=inside, other=0.0)
    offset = scale if offsets is None else tl.load(offsets + place, mask=inside, other=0.0)
    return scale, offset


@triton.jit
def _add_group(  # type: ignore[no-untyped-def]
    sums, part, row_part, scale, offset, offsets, BITS: tl.constexpr, FACTOR: tl.constexpr
):
    """`sums` plus a group's products, with its scale and its offset times the sum of the row."""
    scale = scale.to(tl.float32)
    sums += part * (scale * FACTOR)[:, None]
    if offsets is not None:
        CENTRE: tl.constexpr = 8.0 if BITS == 4 else 128.0
        sums += (scale * CENTRE - offset.to(tl.float32))[:, None] * row_part[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def int8_linear_kernel(  # type: ignore[no-untyped-def]
    rows,
    tiles,
    scales,
    row_scales,
    bias,
    out,
    sums,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    num_tiles,
    tiles_per_split,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    rows += row.to(tl.int64)[:, None] * row_stride
    # Sums of integers are exact in any order: without programs per split, one covers all.
    first = tl.program_id(2) * tiles_per_split
    last = num_tiles if sums is None else tl.minimum(first + tiles_per_split, num_tiles)
    total = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.int32)
    tiles = _first_tile(tiles, first, output, num_outputs, STEP)
    for tile in range(first, last):
        values = tl.load(tiles, mask=is_output[:, None], other=0)
        tiles += num_outputs * STEP
        column = tile * STEP + tl.arange(0, STEP)
        inside = is_row[:, None] & (column < num_inputs)[None, :]
        numbers = tl.load(rows + column[None, :], mask=inside, other=0)
        total = tl.dot(values, tl.trans(numbers), total, out_dtype=tl.int32)
    written = is_row[:, None] & is_output[None, :]
    if sums is None:
        scale = tl.load(scales + output, mask=is_output, other=0.0)
        row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
        scaled = tl.trans(total).to(tl.float32) * scale[None, :] * row_scale[:, None]
        _store(scaled, bias, out, row, output, num_outputs, written)
    else:
        row += tl.program_id(2) * num_rows
        _store(tl.trans(total), None, sums, row, output, num_outputs, written)


@triton.jit
def _store(numbers, bias, out, row, output, num_outputs, written):  # type: ignore[no-untyped-def]
    """Write `numbers [rows, outputs]`, plus the bias, in the type of `out`."""
    if bias is not None:
        numbers += tl.load(bias + output, mask=output < num_outputs, other=0.0)[None, :]
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits_kernel(  # type: ignore[no-untyped-def]
    sums,
    scales,
    row_scales,
    bias,
    out,
    num_rows,
    num_outputs,
    SPLITS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    """Add up the sums of splits, in their order. The grid is (rows, tiles of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    inside = output < num_outputs
    total = tl.zeros([TILE_OUTPUTS], sums.dtype.element_ty)
    for split in tl.static_range(SPLITS):
        place = (split * num_rows + row) * num_outputs + output
        total += tl.load(sums + place, mask=inside, other=0)
    numbers = total.to(tl.float32)
    if row_scales is not None:
        numbers *= tl.load(scales + output, mask=inside, other=0.0)
        numbers *= tl.load(row_scales + row)
    if bias is not None:
        numbers += tl.load(bias + output, mask=inside, other=0.0)
    tl.store(out + row * num_outputs + output, numbers.to(out.dtype.element_ty), mask=inside)

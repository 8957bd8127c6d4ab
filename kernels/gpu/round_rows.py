"""Rounds rows to 8-bit integers: a program per row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import next_power_of_2

# Numbers that a program reads at once, at most, and those of a warp.
_MOST_NUMBERS = 8192
_NUMBERS_PER_WARP = 512


def round_rows_triton(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.tiled_linear.round_rows_to_int8`."""
    num_rows, num_inputs = rows.shape
    integers = torch.empty(num_rows, num_inputs, dtype=torch.int8, device=rows.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    if rows.numel():
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        tile = min(max(next_power_of_2(num_inputs), _NUMBERS_PER_WARP), _MOST_NUMBERS)
        _round_rows_kernel[(num_rows,)](
            rows,
            integers,
            scales,
            rows.stride(0),
            num_inputs,
            TILE=tile,
            num_warps=tile // _NUMBERS_PER_WARP,
            # Products are rounded before they are rounded to integers, as on the processor.
            enable_fp_fusion=False,
        )
    return integers, scales


@triton.jit
def _round_rows_kernel(  # type: ignore[no-untyped-def]
    rows, integers, scales, row_stride, num_inputs, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    rows += row * row_stride
    integers += row * num_inputs
    places = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.float32)
    # A maximum ignores NaN, a sum does not.
    nothing = tl.zeros([TILE], tl.float32)
    for start in range(0, num_inputs, TILE):
        inside = start + places < num_inputs
        numbers = tl.load(rows + start + places, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
        nothing += tl.where(numbers == numbers, 0.0, float("nan"))
    most = tl.max(largest, 0)
    tl.store(scales + row, tl.div_rn(most, 127.0) + tl.sum(nothing, 0))
    factor = tl.where(most > 0, tl.div_rn(127.0, most), 0.0)
    for start in range(0, num_inputs, TILE):
        inside = start + places < num_inputs
        numbers = tl.load(rows + start + places, mask=inside, other=0.0).to(tl.float32)
        scaled = numbers * factor
        # Infinity times 0 and NaN, whose scale says so.
        scaled = tl.where(scaled == scaled, scaled, 0.0)
        # Numbers near 1.5 * 2^23 are whole: the sum is rounded to nearest, ties to even.
        rounded = (scaled + 12582912.0) - 12582912.0
        tl.store(integers + start + places, rounded.to(tl.int8), mask=inside)

"""Launches products with tiled weights. A program multiplies some outputs with some rows."""

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu.launch import gpu_of
from kernels.gpu.linear_launch import linear_launch, num_splits
from kernels.gpu.tiled_linear_kernels import (
    add_splits_kernel,
    int8_linear_kernel,
    tiled_linear_kernel,
)
from kernels.inputs.tiled_weight import TiledWeight

# Outputs whose splits a program adds up.
_ADDED_OUTPUTS = 256


def tiled_linear_triton(
    rows: Tensor,
    weight: TiledWeight,
    bias: Tensor | None,
    row_scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product `[num_rows, num_outputs]` in `dtype`.

    `rows` are in the order of the weight's columns; with `row_scales` they are int8.
    """
    num_rows, num_inputs = rows.shape
    num_outputs, num_tiles = weight.num_outputs, len(weight.tiles)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=rows.device)
    if num_rows == 0:
        return out
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    gpu = gpu_of(rows.device)
    splits = num_splits(gpu, num_outputs, num_inputs)
    step_inputs = weight.step * (2 if weight.bits == 4 else 1)
    launch = linear_launch(
        gpu, num_rows, splits, rows.dtype, weight.step, step_inputs, weight.groups_per_tile
    )
    sums = None
    if launch.split_programs:
        sums_dtype = torch.float32 if row_scales is None else torch.int32
        sums = torch.empty(splits, num_rows, num_outputs, dtype=sums_dtype, device=rows.device)
    grid = (
        triton.cdiv(num_rows, launch.tile_rows),
        triton.cdiv(num_outputs, launch.tile_outputs),
        splits if launch.split_programs else 1,
    )
    scales: tuple[Tensor | None, ...] = (weight.scales, row_scales)
    kernel, options = int8_linear_kernel, {}
    if row_scales is None:
        scales = (weight.scales, weight.offsets)
        kernel, options = tiled_linear_kernel, _options(weight, rows.dtype)
    sizes = (num_rows, num_outputs, num_inputs, rows.stride(0), num_tiles)
    kernel[grid](
        rows,
        weight.tiles,
        *scales,
        bias,
        out,
        sums,
        *sizes,
        triton.cdiv(num_tiles, splits),
        TILE_ROWS=launch.tile_rows,
        TILE_OUTPUTS=launch.tile_outputs,
        STEP=weight.step,
        SPLITS=splits,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **options,
    )
    if sums is not None:
        _add_splits(sums, weight.scales, row_scales, bias, out)
    return out


def _options(weight: TiledWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the kernel for rows that are not integers."""
    return {
        "BITS": weight.bits,
        "HAS_GROUPS": weight.has_groups,
        "GROUP_SIZE": weight.group_size if weight.has_groups else 0,
        "STEPS_PER_GROUP": weight.steps_per_group if weight.has_groups else 0,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }


def _add_splits(
    sums: Tensor, scales: Tensor, row_scales: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """Write the sums of splits `[splits, num_rows, num_outputs]`. Sums of integers have no scales
    yet."""
    splits, num_rows, num_outputs = sums.shape
    add_splits_kernel[(num_rows, triton.cdiv(num_outputs, _ADDED_OUTPUTS))](
        sums,
        None if row_scales is None else scales,
        row_scales,
        bias,
        out,
        num_rows,
        num_outputs,
        SPLITS=splits,
        TILE_OUTPUTS=_ADDED_OUTPUTS,
        num_warps=4,
    )

"""Launch parameters of products with tiled weights: pure functions, as in `kernels/gpu/launch.py`.

What decides the order in which a row's products are added up, which is the size of tiles along the
inputs and the number of splits, depends on the weight and the device alone. So a row's result does
not depend on the rows beside it.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch

from kernels.gpu.launch import Gpu

# Rows of a tile, for few, some and many rows; the first of 8-bit rows only. The warm-up runs each
# (`worker_svc/gpu/device_pass.py`).
ROW_TILES: Final[tuple[int, ...]] = (8, 16, 64, 128)
# Up to as many rows memory is the bottleneck.
_MOST_FEW_ROWS: Final = 16
# The same in single precision, whose products take three times the registers.
_SINGLE_ROW_TILES: Final[tuple[int, ...]] = (16, 32)
# Programs per multiprocessor that keep its memory busy.
_PROGRAMS: Final = 2
# Fewer inputs are not worth a split, whose sums are written and read again.
_FEWEST_SPLIT_INPUTS: Final = 1024
_MOST_SPLITS: Final = 8
_OUTPUTS: Final = 64
_OTHER_SHARED_BYTES: Final = 2048


@dataclass(frozen=True)
class LinearLaunch:
    """Launch parameters of a product."""

    tile_rows: int
    tile_outputs: int
    num_warps: int
    num_stages: int  # of the pipeline that fetches weights and rows
    # Whether each split has programs of its own, whose sums are added up by another kernel.
    # Otherwise a program computes all splits, one after another.
    split_programs: bool


def num_splits(gpu: Gpu, num_outputs: int, num_inputs: int) -> int:
    """Into how many ranges of inputs the sums of a weight's products are divided."""
    programs = -(-num_outputs // _OUTPUTS)
    wanted = _PROGRAMS * gpu.num_multiprocessors // programs
    return max(min(wanted, num_inputs // _FEWEST_SPLIT_INPUTS, _MOST_SPLITS), 1)


def linear_launch(
    gpu: Gpu,
    num_rows: int,
    splits: int,
    dtype: torch.dtype,
    step_bytes: int,
    step_inputs: int,
    groups_per_tile: int,
) -> LinearLaunch:
    """The launch for rows of `dtype`. An output has `step_bytes` of a tile of `step_inputs` inputs,
    which belong to 1 or 2 groups, or to 0 if there are no groups.

    Chosen so that no register spills; tests check the compiled code.
    """
    tiles = ROW_TILES if dtype == torch.int8 else ROW_TILES[1:]
    if dtype == torch.float32:
        tiles = _SINGLE_ROW_TILES
    if groups_per_tile + (splits > 1) > 1:
        # Sums of groups, of a split and of all take registers.
        tiles = tiles[:-1]
    rows = next((size for size in tiles if num_rows <= size), tiles[-1])
    if num_rows <= _MOST_FEW_ROWS and dtype == torch.int8:
        # Many bytes are in flight, of many programs. Programs of one warp do not use the
        # instructions of those with many rows, but sums of integers are the same.
        launch = LinearLaunch(rows, 16, 1, 4, splits > 1)
    elif num_rows <= _MOST_FEW_ROWS:
        # Four warps run the instructions of programs with many rows, which add up a row's products
        # in the same order: those of one warp divide the inputs of a step in another way.
        launch = LinearLaunch(rows, _OUTPUTS, 4, 4, splits > 1)
    elif dtype == torch.float32:
        launch = LinearLaunch(rows, _OUTPUTS, 4, 3, False)
    else:
        # A value is converted once for all rows of a tile.
        launch = LinearLaunch(rows, 128, 8, 4, False)
    return _fitting(launch, gpu, dtype, step_bytes, step_inputs)


def _fitting(
    launch: LinearLaunch, gpu: Gpu, dtype: torch.dtype, step_bytes: int, step_inputs: int
) -> LinearLaunch:
    """Reduce stages until the launch fits into shared memory."""
    row_bytes = launch.tile_rows * step_inputs * dtype.itemsize
    stage_bytes = launch.tile_outputs * step_bytes + row_bytes
    # The converted weights, for tensor cores that read them there.
    rest = launch.tile_outputs * step_inputs * dtype.itemsize + _OTHER_SHARED_BYTES
    stages = min(launch.num_stages, (gpu.shared_bytes - rest) // stage_bytes)
    return replace(launch, num_stages=max(stages, 1))

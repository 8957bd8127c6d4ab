"""Prints, as JSON, what the launches of products with quantised weights become for a GPU that is
not there. To be run without TRITON_INTERPRET: `python -m compiled_linear`.

All tensors are without data: a launch that read a number from the device would fail.
"""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from compiled_kernels import Compiled, Recorder

from kernels.gpu import round_rows, tiled_linear
from kernels.inputs.tiled_weight import TiledWeight
from kernels.quantized import Bits


def weight_of(
    bits: Bits,
    group_size: int | None,
    has_offsets: bool,
    rounds_rows: bool,
    num_outputs: int,
    num_inputs: int,
) -> TiledWeight:
    """As `TiledWeight.of` makes it."""
    has_groups = group_size is not None
    group_size = group_size or num_inputs
    step = 128 if rounds_rows else min(64, group_size)
    scales = torch.empty(
        num_inputs // group_size, num_outputs, dtype=torch.float16 if has_groups else torch.float32
    )
    return TiledWeight(
        tiles=torch.empty(num_inputs * bits // 8 // step, num_outputs, step, dtype=torch.int8),
        bits=bits,
        scales=scales,
        # Those of a checkpoint whose scales have 16 bits.
        offsets=scales.float() if has_offsets else None,
        group_size=group_size,
        num_inputs=num_inputs,
        permutation=None,
        rounds_rows=rounds_rows,
        dtype=torch.bfloat16,
    )


def launches() -> Iterator[tuple[dict[str, Any], TiledWeight, torch.dtype, int]]:
    """Attributes by which tests find a launch; weight, dtype, number of rows."""
    half = torch.bfloat16
    forms: list[tuple[Bits, int | None, bool, bool, torch.dtype]] = [
        (8, None, False, True, half),
        (8, None, False, False, half),
        (8, None, True, False, half),
        (8, 16, False, False, half),
        (4, 128, True, False, half),
        (4, 128, False, False, half),
        (4, 64, True, False, half),
        (4, 32, True, False, half),
        (4, 128, True, False, torch.float16),
        (4, 128, True, False, torch.float32),
        (8, None, False, True, torch.float32),
        (8, None, False, False, torch.float32),
    ]
    names = ("bits", "group_size", "has_offsets", "rounds_rows", "dtype")
    # Few outputs, whose sums are divided, and many.
    for form, (num_rows, num_outputs) in product(forms, ((1, 4096), (64, 4096), (2048, 32_768))):
        what = {**dict(zip(names, form, strict=True)), "num_rows": num_rows}
        yield what, weight_of(*form[:4], num_outputs, 4096), form[4], num_rows


def multiply_steps_of_many_sizes() -> None:
    for num_rows in (1, 2, 15, 16, 17, 33, 64, 65, 100, 513, 4096):
        for form in ((4, 128, True, False), (8, None, False, True)):
            multiply(num_rows, weight_of(*form, 4096, 4096), torch.bfloat16)


def multiply(num_rows: int, weight: TiledWeight, dtype: torch.dtype) -> None:
    """As `kernels.tiled_linear` does, which imports the kernels only where they can run."""
    rows = torch.empty(num_rows, weight.num_inputs, dtype=dtype)
    if weight.rounds_rows:
        integers, scales = round_rows.round_rows_triton(rows)
        tiled_linear.tiled_linear_triton(integers, weight, None, scales, dtype)
    else:
        tiled_linear.tiled_linear_triton(rows, weight, None, None, dtype)


def main() -> None:
    compiled: list[Compiled] = []
    for module in (round_rows, tiled_linear):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Recorder(getattr(module, name), compiled))
    found = []
    for what, weight, dtype, num_rows in launches():
        compiled.clear()
        multiply(num_rows, weight, dtype)
        words = {name: str(value) for name, value in what.items()}
        found += [{**vars(each), **words} for each in compiled]
    compiled.clear()
    multiply_steps_of_many_sizes()
    found += [{**vars(each), "steps": "many"} for each in compiled]
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.device("meta"):
        main()

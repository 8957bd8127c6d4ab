"""Products with quantised weights, compared with torch's products in 16 bits and with copies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import linear

from benchmarks.gpu.device import Calls, Device
from benchmarks.gpu.kernels import OF_COPY_NOTE, copies, num_working_sets, target
from benchmarks.gpu.paged import DTYPE
from benchmarks.report import Cell, Column, Part
from kernels.inputs.tiled_weight import TiledWeight
from kernels.quantized import Bits, quantize
from kernels.tiled_linear import tiled_linear, tiled_linear_reference

_ROWS = (1, 16, 64, 256, 2048, 8192)
# Of outputs and inputs: layers of models of 0.6 and 8 billion weights.
_SIZES = ((3072, 1024), (14_336, 4096))
# Few rows read a weight at the bandwidth of copies.
_OF_COPIES = 0.7
# Largest difference of a checked row, relative to the largest number.
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Form:
    """A kind of quantised weight."""

    title: str
    bits: Bits
    group_size: int | None
    int8_rows: bool

    def weight(self, num_outputs: int, num_inputs: int, where: torch.device) -> TiledWeight:
        wide = torch.randn(num_outputs, num_inputs, device=where)
        rounded = quantize(wide, self.bits, self.group_size)
        return TiledWeight.of(replace(rounded, int8_activations=self.int8_rows), DTYPE)


_FORMS = (
    Form("int8, rows of 8 bits", 8, None, True),
    Form("int8, rows of 16 bits", 8, None, False),
    Form("int4, groups of 128", 4, 128, False),
)


def products(device: Device, scale: int = 1) -> Part:
    """Measure products of few and many rows. `scale` divides the work."""
    rows = [
        _row(device, form, num_rows, (num_outputs // scale, max(num_inputs // scale, 128)))
        for num_outputs, num_inputs in _SIZES
        for form in _FORMS
        for num_rows in sorted({max(count // scale, 1) for count in _ROWS})
    ]
    return Part(
        name="products",
        title="Products with quantised weights",
        notes=[
            "Rows x outputs x inputs, rows of bfloat16. *Times torch*: the time of torch's product "
            "with a weight of bfloat16 over that of Quire's kernel. Bytes are those of the weight, "
            f"without scales, rows and results. {OF_COPY_NOTE}"
        ],
        columns=[
            Column("what", "what"),
            Column("us", "us", ",.1f"),
            Column("tflops", "TFLOP/s", ",.1f"),
            Column("of_copy", "of copies", ".2f"),
            Column("times_torch", "times torch", ".2f"),
        ],
        rows=rows,
        targets=[
            target(f"products, {row['what']}", _OF_COPIES, row["of_copy"])
            for row in rows
            if str(row["what"]).startswith("1 x")
        ],
    )


def _row(device: Device, form: Form, num_rows: int, size: tuple[int, int]) -> dict[str, Cell]:
    num_outputs, num_inputs = size
    where = device.torch_device
    num_bytes = num_outputs * num_inputs * form.bits // 8
    weights = [
        form.weight(num_outputs, num_inputs, where)
        for _ in range(num_working_sets(device, num_bytes))
    ]
    states = torch.randn(num_rows, num_inputs, device=where, dtype=DTYPE)
    _check(states, weights[0])
    wide = torch.randn(
        num_working_sets(device, 2 * num_outputs * num_inputs), *size, device=where, dtype=DTYPE
    )
    functions: Mapping[str, Calls] = {
        "ours": [partial(tiled_linear, states, weight) for weight in weights],
        "torch": [partial(linear, states, weight) for weight in wide],
        "copy": copies(device, num_bytes),
    }
    seconds = device.median_seconds(functions)
    return {
        "what": f"{num_rows} x {num_outputs} x {num_inputs}, {form.title}",
        "us": 1e6 * seconds["ours"],
        "tflops": 2 * num_rows * num_outputs * num_inputs / seconds["ours"] / 1e12,
        "of_copy": seconds["copy"] / seconds["ours"],
        "times_torch": seconds["torch"] / seconds["ours"],
    }


def _check(states: torch.Tensor, weight: TiledWeight) -> None:
    """ValueError if the first and the last row differ from the reference."""
    found = tiled_linear(states, weight)[[0, -1]].float()
    expected = tiled_linear_reference(states[[0, -1]], weight).float()
    if (found - expected).abs().max() > _TOLERANCE * expected.abs().max():
        raise ValueError("the product differs from its reference")

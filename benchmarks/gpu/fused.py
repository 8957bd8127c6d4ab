"""The operations between products, compared with torch's operations and with copies."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Calls, Device
from benchmarks.gpu.kernels import OF_COPY_NOTE, copies, num_working_sets, target
from benchmarks.gpu.paged import DTYPE
from benchmarks.report import Cell, Column, Part
from kernels.fused import (
    Activation,
    add_rms_norm,
    add_rms_norm_reference,
    gated_activation,
    gated_activation_reference,
    qk_norm_rope,
    qk_norm_rope_reference,
)

_ROWS = (1, 16, 256, 8192)
# The bandwidth of copies is the limit of the largest batch alone.
_OF_COPIES = 0.8
# Largest difference of a checked result, relative to the largest number: a rounding.
_TOLERANCE = 1e-2
_EPSILON = 1e-6
_DIM = 128

Operation = Callable[[], object]


@dataclass(frozen=True)
class Model:
    """The sizes of a model."""

    title: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int

    def scaled(self, scale: int) -> "Model":
        """Of a smaller one with as many heads."""
        sizes = self.hidden_size // scale, self.intermediate_size // scale
        return Model(self.title, *sizes, self.num_heads, self.num_kv_heads)


_MODELS = (Model("0.6b", 1024, 3072, 16, 8), Model("8b", 4096, 14_336, 32, 8))


@dataclass(frozen=True)
class Case:
    """One operation on one batch."""

    what: str
    num_bytes: int  # read and written
    ours: Operation
    of_torch: Operation


def fused(device: Device, scale: int = 1) -> Part:
    """Measure norms of sums, heads and gates. `scale` divides the work."""
    rows = [
        _row(device, make)
        for model in _MODELS
        for num_rows in sorted({max(count // scale, 1) for count in _ROWS})
        for make in _makers(model.scaled(scale), num_rows, device.torch_device)
    ]
    return Part(
        name="fused",
        title="Operations between products",
        notes=[
            "Rows of bfloat16. *Norm*: of a sum, which is written, too. *Heads*: norm and rotary "
            "embedding of queries and keys. *Gate*: SiLU times the other product, both parts of "
            "one. *Times torch*: the time of the references, which are torch's operations, over "
            f"that of Quire's kernel. {OF_COPY_NOTE}"
        ],
        columns=[
            Column("what", "what"),
            Column("us", "us", ",.1f"),
            Column("gbs", "GB/s", ",.0f"),
            Column("of_copy", "of copies", ".2f"),
            Column("times_torch", "times torch", ".1f"),
        ],
        rows=rows,
        targets=[
            target(f"fused, {row['what']}", _OF_COPIES, row["of_copy"])
            for row in rows
            if f", {max(_ROWS) // scale} rows" in str(row["what"])
        ],
    )


def _makers(model: Model, num_rows: int, where: torch.device) -> Iterator[Callable[[], Case]]:
    for make in (_norm, _heads, _gate):
        yield partial(make, model, num_rows, where)


def _norm(model: Model, num_rows: int, where: torch.device) -> Case:
    states, added = torch.randn(2, num_rows, model.hidden_size, device=where, dtype=DTYPE)
    weight = torch.randn(model.hidden_size, device=where)
    arguments = (states, added, weight, _EPSILON)
    return Case(
        f"{model.title}, {num_rows} rows, norm",
        4 * states.nbytes + weight.nbytes,
        partial(add_rms_norm, *arguments),
        partial(add_rms_norm_reference, *arguments),
    )


def _heads(model: Model, num_rows: int, where: torch.device) -> Case:
    num_rotated = model.num_heads + model.num_kv_heads
    # Of one product, which has values, too.
    size = (num_rows, num_rotated + model.num_kv_heads, _DIM)
    heads = torch.randn(size, device=where, dtype=DTYPE)[:, :num_rotated]
    angles = torch.randn(1, num_rows, _DIM, device=where)
    cosines, sines = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    norms = torch.rand(num_rotated, _DIM, device=where)
    arguments = (heads, cosines, sines, norms, _EPSILON)
    moved = 2 * heads.numel() * heads.itemsize

    def ours() -> Tensor:
        qk_norm_rope(*arguments)
        return heads

    return Case(
        f"{model.title}, {num_rows} rows, heads",
        moved + cosines.nbytes + sines.nbytes + norms.nbytes,
        ours,
        partial(qk_norm_rope_reference, *arguments),
    )


def _gate(model: Model, num_rows: int, where: torch.device) -> Case:
    size = (num_rows, 2 * model.intermediate_size)
    gate, up = torch.randn(size, device=where, dtype=DTYPE).chunk(2, -1)
    return Case(
        f"{model.title}, {num_rows} rows, gate",
        3 * gate.numel() * gate.itemsize,
        partial(gated_activation, gate, up, Activation.SILU),
        partial(gated_activation_reference, gate, up, Activation.SILU),
    )


def _row(device: Device, make: Callable[[], Case]) -> dict[str, Cell]:
    first = make()
    cases = [make() for _ in range(num_working_sets(device, first.num_bytes))]
    _check(cases[0])
    functions: Mapping[str, Calls] = {
        "ours": [case.ours for case in cases],
        "torch": [case.of_torch for case in cases],
        "copy": copies(device, first.num_bytes),
    }
    seconds = device.median_seconds(functions)
    return {
        "what": first.what,
        "us": 1e6 * seconds["ours"],
        "gbs": first.num_bytes / seconds["ours"] / 1e9,
        "of_copy": seconds["copy"] / seconds["ours"],
        "times_torch": seconds["torch"] / seconds["ours"],
    }


def _check(case: Case) -> None:
    """ValueError if the result is not that of the reference."""
    expected: Any = case.of_torch()
    found: Any = case.ours()
    for one, other in zip(_tensors(found), _tensors(expected), strict=True):
        difference = (one.float() - other.float()).abs().max()
        if difference > _TOLERANCE * other.float().abs().max():
            raise ValueError(f"{case.what} differs from its reference")


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result

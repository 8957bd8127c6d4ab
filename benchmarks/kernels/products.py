"""Products with weights: limited by memory bandwidth for few rows, by compute for many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from benchmarks.kernels.limits import Limits
from benchmarks.kernels.timing import best_seconds
from benchmarks.report import Cell, Column, Part
from kernels.dispatch import Implementation, choose
from kernels.fused import Activation
from kernels.linear import PackedWeight, gated_linear, linear
from kernels.quantized import Bits, QuantizedWeight

_ROWS = (1, 4, 16, 64, 256, 2048)
# Up to here reading the weights from memory dominates.
_FEW_ROWS = 4
# oneDNN packs a weight for this number of rows. Weights are packed once, as in a server.
_ONEDNN_ROWS = 64
_GROUP_SIZE = 32
_FLOPS_PER_PASS = 2 * 10**9
_ROUNDS = 10

Row = dict[str, Cell]
Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Product:
    """The shape of a product; a gated one has two weights, gate and up."""

    num_inputs: int
    num_outputs: int
    gated: bool = False
    dtype: torch.dtype = torch.float32  # of rows, and of weights that are not quantised
    bits: Bits | None = None

    @property
    def weight_bytes(self) -> int:
        count = (1 + self.gated) * self.num_inputs * self.num_outputs
        if self.bits is None:
            return count * self.dtype.itemsize
        # With a scale and an offset of 16 bits per group.
        groups = 0 if self.bits == 8 else count // _GROUP_SIZE
        return count * self.bits // 8 + 4 * groups

    def moved_bytes(self, num_rows: int) -> int:
        """Return the bytes of weights, rows and results, each moved once."""
        numbers = num_rows * (self.num_inputs + self.num_outputs)
        return self.weight_bytes + numbers * self.dtype.itemsize

    def flops(self, num_rows: int) -> int:
        return 2 * (1 + self.gated) * num_rows * self.num_inputs * self.num_outputs

    @property
    def title(self) -> str:
        outputs = f"2 x {self.num_outputs}, gated" if self.gated else str(self.num_outputs)
        kind = str(self.dtype)[6:] if self.bits is None else f"int{self.bits}"
        return f"{self.num_inputs} to {outputs}, {kind}"


# Of a model with 30 million parameters: keys and values, queries and outputs, gate and up, down,
# and the vocabulary.
_PRODUCTS = (
    Product(512, 256),
    Product(512, 512),
    Product(512, 1536, gated=True),
    Product(1536, 512),
    Product(512, 8192),
    Product(512, 8192, dtype=torch.bfloat16),
    # Of a model with 600 million parameters.
    Product(1024, 3072, gated=True, dtype=torch.bfloat16),
    Product(3072, 1024, dtype=torch.bfloat16),
    Product(1024, 3072, gated=True, dtype=torch.bfloat16, bits=8),
    Product(3072, 1024, dtype=torch.bfloat16, bits=8),
    Product(1024, 3072, gated=True, dtype=torch.bfloat16, bits=4),
    Product(3072, 1024, dtype=torch.bfloat16, bits=4),
)


def products(limits: Limits) -> Part:
    return Part(
        name="products",
        title="Products with weights",
        notes=[
            "Inputs to outputs. Each product uses another weight; together they exceed four times "
            "the last-level cache. *MB* are weights, rows and results, each moved once. *Of limit* "
            f"is, up to {_FEW_ROWS} rows, their rate as a share of the rate at which a sum over an "
            "array is read by the same threads; for more rows, the rate of operations as a share "
            "of that of torch's product of large matrices of the same dtype. *Torch* is its linear "
            "layer, *oneDNN* the same on weights packed by oneDNN: their times over that of the "
            "kernel. Gates are SiLU; for torch and oneDNN, activation and multiplication are "
            "torch's. Rows of *int8* and *int4* products are bfloat16, and may be rounded to 8 "
            f"bits; int8 has a scale per output, int4 groups of {_GROUP_SIZE} inputs. torch and "
            "oneDNN multiply with weights of bfloat16, whose rate is the limit for many rows."
        ],
        columns=[
            Column("shape", "product"),
            Column("rows", "rows", "d"),
            Column("ms", "ms", ".3f"),
            Column("mflop", "MFLOP", ".1f"),
            Column("gflops", "GFLOP/s", ".0f"),
            Column("mb", "MB", ".1f"),
            Column("gbs", "GB/s", ".1f"),
            Column("of_limit", "of limit", ".2f"),
            Column("of_torch", "torch", ".2f"),
            Column("of_onednn", "oneDNN", ".2f"),
        ],
        rows=[row for product in _PRODUCTS for row in _rows(limits, product)],
        targets=[],
    )


def _rows(limits: Limits, product: Product) -> list[Row]:
    """Measure all numbers of rows on the same weights, which fill the working set."""
    size = (1 + product.gated, product.num_outputs, product.num_inputs)
    count = limits.enough(product.weight_bytes)
    weights = [torch.randn(size).to(product.dtype) for _ in range(count)]
    implementation = choose("cpu", (product.dtype,))
    systems = {
        "ours": [_ours(product, weight, implementation) for weight in weights],
        "torch": [_joined([partial(torch_linear, weight=part) for part in w]) for w in weights],
    }
    if _onednn_has(product.dtype):
        systems["onednn"] = [_joined(list(map(_onednn, weight))) for weight in weights]
    return [_row(limits, product, num_rows, systems) for num_rows in _ROWS]


def _row(
    limits: Limits, product: Product, num_rows: int, systems: dict[str, list[Multiply]]
) -> Row:
    states = torch.randn(num_rows, product.num_inputs).to(product.dtype)
    flops, few = product.flops(num_rows), num_rows <= _FEW_ROWS
    num_calls = max(1, min(len(systems["ours"]), _FLOPS_PER_PASS // flops))
    passes = {name: _pass(calls, states, num_calls) for name, calls in systems.items()}
    taken = best_seconds({**passes, "limit": limits.read} if few else passes, _ROUNDS)
    seconds = taken["ours"] / num_calls
    gflops = flops / seconds / 1e9
    moved_bytes = product.moved_bytes(num_rows)
    gbs = moved_bytes / seconds / 1e9 if few else None
    return {
        "shape": product.title,
        "rows": num_rows,
        "ms": 1000 * seconds,
        "mflop": flops / 1e6,
        "gflops": gflops,
        "mb": moved_bytes / 1e6,
        "gbs": gbs,
        "of_limit": gflops / limits.gigaflops(product.dtype)
        if gbs is None
        else gbs / limits.gigabytes_per_s(taken["limit"]),
        **{f"of_{name}": taken[name] / taken["ours"] for name in systems if name != "ours"},
    }


def _pass(calls: list[Multiply], states: Tensor, num_calls: int) -> Callable[[], None]:
    """Return a function that runs `num_calls` products, cycling through the weights."""
    following = cycle(calls)

    def run() -> None:
        for _ in range(num_calls):
            next(following)(states)

    return run


def _ours(product: Product, weight: Tensor, implementation: Implementation) -> Multiply:
    packed = [_packed(product, part, implementation) for part in weight]
    if len(packed) == 1:
        return partial(linear, weight=packed[0])
    return partial(gated_linear, gate=packed[0], up=packed[1], activation=Activation.SILU)


def _packed(product: Product, weight: Tensor, implementation: Implementation) -> PackedWeight:
    if product.bits is None:
        return PackedWeight.of(weight, implementation)
    # Any numbers: rounding would take longer than all products.
    group_size = product.num_inputs if product.bits == 8 else _GROUP_SIZE
    scales = torch.full((product.num_outputs, product.num_inputs // group_size), 0.01)
    quantized = QuantizedWeight(
        values=torch.randint(2**product.bits, weight.shape, dtype=torch.uint8),
        bits=product.bits,
        scales=scales,
        offsets=scales * 2 ** (product.bits - 1),
        group_size=group_size,
        int8_activations=True,
    )
    return PackedWeight.of_quantized(quantized, implementation, product.dtype)


def _joined(multiplies: Sequence[Multiply]) -> Multiply:
    """Return the only product, or the gated one of two."""
    if len(multiplies) == 1:
        return multiplies[0]
    gate, up = multiplies
    return lambda states: silu(gate(states)) * up(states)


def _onednn_has(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call, no-any-return]


def _onednn(weight: Tensor) -> Multiply:
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda states: multiply(states, laid_out, None, "none", [], "")

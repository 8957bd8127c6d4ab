"""Products of activations with quantised weights on a GPU, which are packed into tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, Implementation, choose
from kernels.inputs.tiled_weight import TiledWeight

if HAS_TRITON:
    from kernels.gpu.round_rows import round_rows_triton
    from kernels.gpu.tiled_linear import tiled_linear_triton


@dataclass(frozen=True)
class TiledLinear:
    """A linear layer: a tiled weight and a float32 bias."""

    weight: TiledWeight
    bias: Tensor | None
    implementation: Implementation

    def __call__(self, states: Tensor) -> Tensor:
        return tiled_linear(states, self.weight, self.bias, implementation=self.implementation)

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self | None:
        """One layer with the outputs of all, a copy; None if their formats differ, or only some
        have a bias."""
        biases = [one.bias for one in layers if one.bias is not None]
        weight = TiledWeight.joined([one.weight for one in layers])
        if weight is None or len(biases) not in (0, len(layers)):
            return None
        return cls(weight, torch.cat(biases) if biases else None, layers[0].implementation)


@dataclass(frozen=True)
class TiledEmbedding:
    """An embedding, whose rows are those of a tiled weight."""

    weight: TiledWeight

    def __call__(self, indices: Tensor) -> Tensor:
        return self.weight.rows(indices)


def tiled_linear(
    states: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    *,
    implementation: Implementation | None = None,
) -> Tensor:
    """`states [..., num_inputs]` times the weight, transposed, plus the float32 `bias`.

    Sums are in float32, or of integers if the weight `rounds_rows`, and rounded once, to the dtype
    of the states. How a row's sums are added up does not depend on the rows beside it.
    """
    implementation = implementation or choose(states.device.type, (states.dtype,))
    rows = states.reshape(-1, weight.num_inputs)
    if weight.permutation is not None:
        rows = rows.index_select(1, weight.permutation)
    if implementation != Implementation.TRITON:
        out = _multiply_reference(rows, weight, bias)
    elif weight.rounds_rows:
        integers, row_scales = round_rows_triton(rows)
        out = tiled_linear_triton(integers, weight, bias, row_scales, states.dtype)
    else:
        out = tiled_linear_triton(rows, weight, bias, None, states.dtype)
    return out.view(*states.shape[:-1], weight.num_outputs)


def tiled_linear_reference(
    states: Tensor, weight: TiledWeight, bias: Tensor | None = None
) -> Tensor:
    """The reference of `tiled_linear`."""
    return tiled_linear(states, weight, bias, implementation=Implementation.REFERENCE)


def round_rows_to_int8(
    rows: Tensor, *, implementation: Implementation | None = None
) -> tuple[Tensor, Tensor]:
    """Rows `[num_rows, n]` as integers from -127 to 127 and a float32 scale per row. The scale of a
    row that is not finite is not finite."""
    implementation = implementation or choose(rows.device.type, (rows.dtype,))
    function = round_rows_to_int8_reference
    if implementation == Implementation.TRITON:
        function = round_rows_triton
    return function(rows)


def round_rows_to_int8_reference(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The reference of `round_rows_to_int8`."""
    wide = rows.float()
    most = wide.abs().amax(1, keepdim=True)
    # Not 127 / most, which torch computes as a product with the reciprocal.
    factor = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)
    integers = (wide * factor).nan_to_num(0.0).round().to(torch.int8)
    return integers, (most / 127).squeeze(1)


def _multiply_reference(rows: Tensor, weight: TiledWeight, bias: Tensor | None) -> Tensor:
    numbers = rows.float()
    if weight.rounds_rows:
        integers, scales = round_rows_to_int8_reference(rows)
        numbers = integers.float() * scales.unsqueeze(1)
    in_order = replace(weight, permutation=None).unpacked().dequantize()
    out = numbers @ in_order.T
    return (out if bias is None else out + bias).to(rows.dtype)

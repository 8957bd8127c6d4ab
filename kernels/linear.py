"""Products of activations with packed weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.fused import Activation, gated_activation_reference
from kernels.quantized import QuantizedWeight, fit_float16

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[num_outputs, num_inputs]`, packed into panels of adjacent rows.

    A kernel reads a panel sequentially: for each input, the weights of the outputs that one step
    computes. The layout is specific to an implementation.
    """

    # [ceil(num_outputs / width), num_inputs, width], zeros beyond the last output. Of bfloat16,
    # where an implementation multiplies pairs, and for an even number of inputs:
    # [ceil(num_outputs / width), num_inputs / 2, width, 2]. Of a quantised weight: bytes that
    # describe themselves (kernels/cpu/linear/quantized.h).
    panels: Tensor
    num_outputs: int
    implementation: Implementation
    dtype: torch.dtype  # of the rows that are looked up

    @classmethod
    def of(cls, weight: Tensor, implementation: Implementation) -> Self:
        """Pack a copy of `weight`, of one of WEIGHT_DTYPES."""
        panels = torch.ops.quire.pack_panels(
            weight, _is_paired(weight, implementation), implementation.isa
        )
        return cls(panels, len(weight), implementation, weight.dtype)

    @classmethod
    def of_quantized(
        cls, weight: QuantizedWeight, implementation: Implementation, dtype: torch.dtype
    ) -> Self:
        """Pack a copy of a quantised weight; its rows are looked up in `dtype`.

        Scales and offsets of groups are rounded to float16, unless one is too large or too small.
        """
        has_groups = weight.group_size < weight.num_inputs
        panels = torch.ops.quire.pack_quantized(
            weight.values.contiguous(),
            weight.bits,
            weight.scales.contiguous(),
            weight.offsets.contiguous(),
            weight.group_size,
            None if weight.permutation is None else weight.permutation.contiguous(),
            weight.int8_activations,
            has_groups and fit_float16(weight.scales) and fit_float16(weight.offsets),
            implementation.isa,
        )
        return cls(panels, weight.num_outputs, implementation, dtype)

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        """One weight with the outputs of all, of one dtype and size of inputs. ValueError if
        some are quantised and others are not, or if their inputs are in different orders."""
        first = weights[0]
        if len({weight.is_quantized for weight in weights}) != 1:
            raise ValueError("weights of which some are quantised")
        if first._goes_on_with(weights[1:]):
            panels = torch.ops.quire.join_panels([weight.panels for weight in weights])
            num_outputs = sum(weight.num_outputs for weight in weights)
            return cls(panels, num_outputs, first.implementation, first.dtype)
        if first.is_quantized:
            joined = QuantizedWeight.joined([weight.unpacked() for weight in weights])
            return cls.of_quantized(joined, first.implementation, first.dtype)
        rows = [weight.rows(torch.arange(weight.num_outputs)) for weight in weights]
        return cls.of(torch.cat(rows), first.implementation)

    @property
    def is_quantized(self) -> bool:
        return self.panels.dtype == torch.uint8

    def is_like(self, other: Self) -> bool:
        """Whether one call may multiply with both: see `gated_linear`."""
        alike: bool = torch.ops.quire.are_alike(self.panels, other.panels)
        return alike and self.num_outputs == other.num_outputs

    def _goes_on_with(self, others: Sequence[Self]) -> bool:
        """Whether the panels of all, one after the other, are those of one weight."""
        width = torch.ops.quire.panel_width(self.implementation.isa)
        return all(
            before.num_outputs % width == 0 and torch.ops.quire.are_alike(self.panels, after.panels)
            for before, after in pairwise([self, *others])
        )

    def unpacked(self) -> QuantizedWeight:
        """The quantised weight as it was packed."""
        values, scales, offsets, permutation, bits, group_size, int8_activations = (
            torch.ops.quire.unpack_quantized(self.panels, self.num_outputs)
        )
        return QuantizedWeight(
            values,
            bits,
            scales,
            offsets,
            group_size,
            permutation if len(permutation) else None,
            int8_activations,
        )

    def rows(self, indices: Tensor) -> Tensor:
        """The weight's rows at the int64 indices: `[*indices.shape, num_inputs]`. IndexError if one
        is out of range."""
        rows: Tensor = torch.ops.quire.panel_rows(
            self.panels, self.num_outputs, indices.flatten().contiguous(), self.dtype
        )
        return rows.view(*indices.shape, rows.shape[1])


def _is_paired(weight: Tensor, implementation: Implementation) -> bool:
    has_pairs = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return has_pairs and bool(torch.ops.quire.pairs_bfloat16(implementation.isa))


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer: a packed weight and a float32 bias."""

    weight: PackedWeight
    bias: Tensor | None

    @classmethod
    def joined(cls, products: Sequence[Self]) -> Self:
        """One product with the outputs of all. ValueError as in `PackedWeight.joined`."""
        weights = [product.weight for product in products]
        joined = PackedWeight.joined(weights)
        biases = [product.bias for product in products]
        if all(bias is None for bias in biases):
            return cls(joined, None)
        counts = [weight.num_outputs for weight in weights]
        filled = [
            torch.zeros(count) if bias is None else bias
            for bias, count in zip(biases, counts, strict=True)
        ]
        return cls(joined, torch.cat(filled))

    def __call__(self, states: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(states, self.weight, self.bias, residual)


def linear(
    states: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`states [..., num_inputs]` times the weight, transposed, plus the float32 `bias`, plus the
    `residual`, which is dense, with the shape and dtype of the result.

    Sums are in float32 and rounded once, to the dtype of the states. A row's result does not
    depend on the rows beside it. Quantised weights that allow it are multiplied with rows rounded
    to 8 bits, where the implementation has an instruction for that.
    """
    return _multiply(states, weight, bias, None, None, Activation.SILU, residual)


def gated_linear(
    states: Tensor,
    gate: PackedWeight,
    up: PackedWeight,
    activation: Activation,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """`activation(linear(states, gate)) * linear(states, up)`, rounded once.

    The weights have the same shape and dtype, or are quantised alike.
    """
    if up.num_outputs != gate.num_outputs:
        raise ValueError(f"a gate of {gate.num_outputs} outputs for {up.num_outputs}")
    return _multiply(states, gate, gate_bias, up.panels, up_bias, activation)


def _multiply(
    states: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    second_panels: Tensor | None,
    second_bias: Tensor | None,
    activation: Activation,
    residual: Tensor | None = None,
) -> Tensor:
    out: Tensor = torch.ops.quire.linear(
        states,
        weight.panels,
        weight.num_outputs,
        bias,
        second_panels,
        second_bias,
        activation,
        residual,
        weight.implementation.isa,
    )
    return out


def linear_reference(
    states: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The reference of `linear`, with the unpacked weight."""
    out = _wide(states, weight, bias)
    return (out if residual is None else out + residual.float()).to(states.dtype)


def gated_linear_reference(
    states: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """The reference of `gated_linear`, with the unpacked weights."""
    gates, values = _wide(states, gate, gate_bias), _wide(states, up, up_bias)
    return gated_activation_reference(gates, values, activation).to(states.dtype)


def round_rows(states: Tensor) -> Tensor:
    """The float32 rows that products of rows of 8 bits multiply: integers from -127 to 127, times
    a scale per row."""
    most = states.float().abs().amax(-1, keepdim=True)
    # Not 127 / most, which torch computes as a product with the reciprocal.
    factor = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)
    return (states.float() * factor).round() * (most / 127)


def quantized_linear_reference(
    states: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    rounds_rows: bool,
) -> Tensor:
    """The reference of `linear` with a quantised weight, with rows of 8 bits or as they are."""
    rows = round_rows(states) if rounds_rows else states.float()
    out = linear_reference(rows, weight.dequantize(), bias, residual)
    return out.to(states.dtype)


def _wide(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = states.float() @ weight.float().T
    return out if bias is None else out + bias

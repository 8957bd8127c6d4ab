"""Weights of 8 and 4 bits, and their quantisation. Every format of checkpoints is converted to
`QuantizedWeight` without loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final, Literal, Self

import torch
from torch import Tensor

Bits = Literal[4, 8]

# A row of weights is quantised in float32; so many weights at a time bound the memory.
_WEIGHTS_AT_ONCE: Final = 2**20
# Sizes of groups of 4-bit weights, the preferred one first.
_GROUP_SIZES: Final = (128, 64, 32, 16)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[num_outputs, num_inputs]` as integers with scales: `scale * value - offset`.

    Column i of `values` has the scale of group `i // group_size`, and multiplies the input
    `permutation[i]`, or i without a permutation.
    """

    values: Tensor  # uint8 [num_outputs, num_inputs], below 2**bits
    bits: Bits
    scales: Tensor  # float32 [num_outputs, num_groups]
    offsets: Tensor  # float32 [num_outputs, num_groups]
    group_size: int  # divides num_inputs; equal to it if an output has one scale
    permutation: Tensor | None = None  # int64 [num_inputs]
    # Whether a product may quantise its inputs to 8 bits, with one scale per row.
    int8_activations: bool = False

    def __post_init__(self) -> None:
        """ValueError if shapes or types do not fit together."""
        num_outputs, num_inputs = self.values.shape
        if self.bits not in (4, 8):
            raise ValueError(f"a weight of {self.bits} bits")
        if self.group_size < 1 or num_inputs % self.group_size:
            raise ValueError(f"groups of {self.group_size} do not divide {num_inputs} inputs")
        scales = (torch.float32, (num_outputs, num_inputs // self.group_size))
        _require("values", self.values, torch.uint8, (num_outputs, num_inputs))
        _require("scales", self.scales, *scales)
        _require("offsets", self.offsets, *scales)
        if self.permutation is not None:
            _require("permutation", self.permutation, torch.int64, (num_inputs,))

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1]

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        order = self.permutation
        return replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            offsets=self.offsets.to(device),
            permutation=None if order is None else order.to(device),
        )

    def dequantize(self) -> Tensor:
        """Float32 `[num_outputs, num_inputs]`, inputs in their original order."""
        groups = self.values.view(self.num_outputs, -1, self.group_size).float()
        weight = (groups * self.scales.unsqueeze(-1) - self.offsets.unsqueeze(-1)).flatten(1)
        if self.permutation is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.permutation, weight)

    def rows(self, indices: Tensor) -> Tensor:
        """The float32 rows of the outputs `indices`, one-dimensional."""
        return self.selected(indices).dequantize()

    def selected(self, indices: Tensor) -> Self:
        """The outputs `indices`, one-dimensional, in this order."""
        return replace(
            self,
            values=self.values[indices],
            scales=self.scales[indices],
            offsets=self.offsets[indices],
        )

    def regrouped(self, group_size: int) -> Self:
        """The same weight in smaller groups. ValueError if they do not divide the present ones."""
        if self.group_size % group_size:
            raise ValueError(f"groups of {self.group_size} in groups of {group_size}")
        times = self.group_size // group_size
        return replace(
            self,
            scales=self.scales.repeat_interleave(times, 1),
            offsets=self.offsets.repeat_interleave(times, 1),
            group_size=group_size,
        )

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self:
        """One weight with the outputs of all, without loss: in the largest bits and in groups that
        divide those of all. ValueError if inputs or permutations differ."""
        first = weights[0]
        for other in weights[1:]:
            if first.num_inputs != other.num_inputs or not _is_same(first, other):
                raise ValueError("weights with inputs in different orders")
        group_size = gcd(*(weight.group_size for weight in weights))
        parts = [weight.regrouped(group_size) for weight in weights]
        return replace(
            first,
            values=torch.cat([part.values for part in parts]),
            bits=max(part.bits for part in parts),
            scales=torch.cat([part.scales for part in parts]),
            offsets=torch.cat([part.offsets for part in parts]),
            group_size=group_size,
            int8_activations=all(part.int8_activations for part in parts),
        )


def quantize(weight: Tensor, bits: Bits, group_size: int | None = None) -> QuantizedWeight:
    """Round a weight `[num_outputs, num_inputs]` to the nearest values of its groups.

    8 bits are symmetric, with one scale per output unless a size of groups is given. 4 bits have a
    scale and an offset per group of 128 inputs, or of 64, 32 or 16 if only that divides them, else
    of all.
    """
    num_outputs, num_inputs = weight.shape
    if group_size is None:
        sizes = () if bits == 8 else _GROUP_SIZES
        group_size = next((size for size in sizes if num_inputs % size == 0), num_inputs)
    function = _symmetric if bits == 8 else _asymmetric
    values = torch.empty_like(weight, dtype=torch.uint8)
    scales, offsets = torch.empty(2, num_outputs, num_inputs // group_size, device=weight.device)
    step = max(1, _WEIGHTS_AT_ONCE // num_inputs)
    for start in range(0, num_outputs, step):
        part = slice(start, start + step)
        copied = weight[part].to(torch.float32, copy=True)
        groups = copied.reshape(-1, num_inputs // group_size, group_size)
        rounded, scales[part], offsets[part] = function(groups)
        values[part].copy_(rounded.flatten(1))
    return QuantizedWeight(values, bits, scales, offsets, group_size, int8_activations=True)


def _symmetric(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values 1 to 255, where 128 is zero, in place of the groups; scales and offsets."""
    low, high = torch.aminmax(groups, dim=-1)
    scales = _nonzero(torch.maximum(-low, high) / 127)
    return groups.div_(scales.unsqueeze(-1)).round_().add_(128), scales, scales * 128


def _asymmetric(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values 0 to 15 in place of the groups; scales and offsets."""
    low, high = torch.aminmax(groups, dim=-1)
    scales = _nonzero((high - low) / 15)
    values = groups.sub_(low.unsqueeze(-1)).div_(scales.unsqueeze(-1)).round_()
    return values.clamp_(0, 15), scales, -low


def fit_float16(numbers: Tensor) -> bool:
    """Whether float16 has them with its full precision."""
    limits = torch.finfo(torch.float16)
    sizes = numbers.abs()
    fit = (sizes == 0) | ((sizes >= limits.smallest_normal) & (sizes <= limits.max))
    return bool(fit.all())


def _nonzero(scales: Tensor) -> Tensor:
    """1 in place of the scale of a constant group, which any scale represents."""
    return torch.where(scales == 0, 1.0, scales)


def _is_same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    if one.permutation is None or other.permutation is None:
        return one.permutation is other.permutation
    return torch.equal(one.permutation, other.permutation)


def _require(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        expected = f"{dtype} {list(shape)}"
        raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, not {expected}")

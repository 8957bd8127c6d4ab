"""A quantised weight in the layout of a GPU's products."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.quantized import Bits, QuantizedWeight, fit_float16

# What tensor cores multiply at once, at least.
_SHORTEST_STEP: Final = 16
_LONGEST_STEP: Final = 64
# Padding is at most this part of a group, unless the shortest steps have more.
_LARGEST_WASTE: Final = 8
# Products of 8-bit integers take twice as many inputs per instruction.
_INT8_STEP: Final = 128


@dataclass(frozen=True)
class TiledWeight:
    """A quantised weight `[num_outputs, num_inputs]`, in tiles of adjacent inputs.

    The columns of a group are padded to whole *steps*. A tile has one step of 8-bit values, or two
    of 4-bit ones. A program reads the tiles of its outputs, each of them contiguous, one after
    another.
    """

    # int8 [num_tiles, num_outputs, step]: values minus 128; or, of 4 bits, minus 8, one step in the
    # low halves of bytes and the next in the high ones. Padding is 0.
    tiles: Tensor
    bits: Bits
    scales: Tensor  # [num_groups, num_outputs], float32, or float16 of groups that it has the range
    # As the scales; None if every offset is its scale times 128, or 8: the integers are symmetric.
    offsets: Tensor | None
    group_size: int
    num_inputs: int
    permutation: Tensor | None  # as in `QuantizedWeight`
    # Whether rows are rounded to 8 bits.
    rounds_rows: bool
    dtype: torch.dtype  # of the rows that are looked up

    @classmethod
    def of(cls, weight: QuantizedWeight, dtype: torch.dtype) -> Self:
        """Pack a copy on the weight's device.

        Scales and offsets of groups are rounded to float16, unless one is too large or too small,
        or only offsets would be rounded. Reads numbers of the weight on the host.
        """
        scales, offsets = weight.scales, weight.offsets
        has_groups = weight.group_size < weight.num_inputs
        if has_groups and fit_float16(scales) and fit_float16(offsets):
            # Multiples of a checkpoint's float16 scales are not rounded.
            if not _are_float16(scales) or _are_float16(offsets):
                offsets = offsets.half()
            scales = scales.half()
        centre = _centre(weight.bits)
        symmetric = bool((scales.float() * centre == offsets.float()).all())
        rounds_rows = weight.int8_activations and weight.bits == 8 and symmetric and not has_groups
        step = _INT8_STEP if rounds_rows else _step(weight.group_size)
        return cls(
            tiles=_tiles(weight.values, weight.bits, weight.group_size, step),
            bits=weight.bits,
            scales=scales.T.contiguous(),
            offsets=None if symmetric else offsets.T.contiguous(),
            group_size=weight.group_size,
            num_inputs=weight.num_inputs,
            permutation=weight.permutation,
            rounds_rows=rounds_rows,
            dtype=dtype,
        )

    @classmethod
    def joined(cls, weights: Sequence[Self]) -> Self | None:
        """A copy with the outputs of all, one after another; None if their formats differ, or the
        orders of their inputs, which are compared on the host."""
        first = weights[0]
        if any(one._format != first._format for one in weights):
            return None
        permutations = [one.permutation for one in weights if one.permutation is not None]
        if any(not one.equal(permutations[0]) for one in permutations):
            return None
        offsets = [one.offsets for one in weights if one.offsets is not None]
        return replace(
            first,
            tiles=torch.cat([one.tiles for one in weights], 1),
            scales=torch.cat([one.scales for one in weights], 1),
            offsets=torch.cat(offsets, 1) if offsets else None,
        )

    @property
    def _format(self) -> tuple[object, ...]:
        """What weights need to have in common to be one."""
        return (
            *(self.bits, self.group_size, self.num_inputs, self.step, self.rounds_rows),
            *(self.dtype, self.scales.dtype, self.permutation is None),
            None if self.offsets is None else self.offsets.dtype,
        )

    @property
    def num_outputs(self) -> int:
        return self.tiles.shape[1]

    @property
    def step(self) -> int:
        """Columns of a step."""
        return self.tiles.shape[2]

    @property
    def steps_per_group(self) -> int:
        return -(-self.group_size // self.step)

    @property
    def has_groups(self) -> bool:
        return self.group_size < self.num_inputs

    @property
    def groups_per_tile(self) -> int:
        """Groups to which the inputs of a tile belong; 0 if an output has one scale."""
        if not self.has_groups:
            return 0
        return 2 if self.bits == 4 and self.steps_per_group % 2 else 1

    @property
    def centre(self) -> int:
        """What was subtracted from the values."""
        return _centre(self.bits)

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        return replace(
            self,
            tiles=self.tiles.to(device),
            scales=self.scales.to(device),
            offsets=None if self.offsets is None else self.offsets.to(device),
            permutation=None if self.permutation is None else self.permutation.to(device),
        )

    def unpacked(self) -> QuantizedWeight:
        """The quantised weight as it was packed."""
        steps = self.tiles
        if self.bits == 4:
            steps = torch.stack([(steps << 4) >> 4, steps >> 4], 1).flatten(0, 1)
        num_groups = len(self.scales)
        steps = steps[: num_groups * self.steps_per_group]
        columns = steps.permute(1, 0, 2).reshape(self.num_outputs, num_groups, -1)
        values = columns[:, :, : self.group_size].flatten(1).to(torch.int16) + self.centre
        scales = self.scales.T.float()
        offsets = scales * self.centre if self.offsets is None else self.offsets.T.float()
        return QuantizedWeight(
            values.to(torch.uint8),
            self.bits,
            scales,
            offsets,
            self.group_size,
            self.permutation,
            self.rounds_rows,
        )

    def rows(self, indices: Tensor) -> Tensor:
        """The weight's rows at the integer indices: `[*indices.shape, num_inputs]`."""
        flat = indices.flatten()
        offsets = self.offsets
        some = replace(
            self,
            tiles=self.tiles.index_select(1, flat),
            scales=self.scales.index_select(1, flat),
            offsets=None if offsets is None else offsets.index_select(1, flat),
        )
        return some.unpacked().dequantize().to(self.dtype).view(*indices.shape, -1)


def _are_float16(numbers: Tensor) -> bool:
    return numbers.half().float().equal(numbers)


def _centre(bits: Bits) -> int:
    return 128 if bits == 8 else 8


def _step(group_size: int) -> int:
    """A power of two that divides groups, or wastes little of them."""
    step = _LONGEST_STEP
    while step > _SHORTEST_STEP and -group_size % step > group_size // _LARGEST_WASTE:
        step //= 2
    return step


def _tiles(values: Tensor, bits: Bits, group_size: int, step: int) -> Tensor:
    num_outputs = len(values)
    groups = (values.to(torch.int16) - _centre(bits)).to(torch.int8)
    groups = groups.view(num_outputs, -1, group_size)
    padded = pad(groups, (0, -group_size % step))
    steps = padded.reshape(num_outputs, -1, step).permute(1, 0, 2).contiguous()
    if bits == 8:
        return steps
    if len(steps) % 2:
        steps = torch.cat([steps, torch.zeros_like(steps[:1])])
    return (steps[0::2] & 0xF) | (steps[1::2] << 4)

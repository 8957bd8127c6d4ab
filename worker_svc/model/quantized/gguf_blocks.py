"""Quantised tensors of GGUF files: blocks of 32 or 256 adjacent inputs of an output.

`ggml-common.h` of llama.cpp defines the blocks. Scales of blocks are float16. Values of 5 and 6
bits become values of 8 bits.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from kernels.quantized import Bits, QuantizedWeight
from worker_svc.model.quantized.integers import split_bytes

# The integers of blocks `[blocks, inputs]`, and the scales and offsets of their groups.
_Parts = tuple[Tensor, Tensor, Tensor]


def weight_of(rows: Tensor, kind: str) -> QuantizedWeight:
    """The weight of uint8 `[num_outputs, bytes]` of one of BLOCK_KINDS."""
    block_bytes, bits, unpack = _KINDS[kind]
    values, scales, offsets = unpack(rows.reshape(-1, block_bytes))
    num_outputs = len(rows)
    return QuantizedWeight(
        values.reshape(num_outputs, -1),
        bits,
        scales.reshape(num_outputs, -1).contiguous(),
        offsets.reshape(num_outputs, -1).contiguous(),
        values.shape[1] // scales.shape[1],
    )


def _q8_0(blocks: Tensor) -> _Parts:
    """A scale and 32 signed integers."""
    scales = _halves(blocks[:, :2])
    return blocks[:, 2:] ^ 128, scales, 128 * scales


def _q4_0(blocks: Tensor) -> _Parts:
    """A scale and 16 bytes."""
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, 8 * scales


def _q4_1(blocks: Tensor) -> _Parts:
    """A scale, a minimum, and 16 bytes."""
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), -_halves(blocks[:, 2:4])


def _q5_0(blocks: Tensor) -> _Parts:
    """A scale, the fifth bits, and 16 bytes with the lower four."""
    scales = _halves(blocks[:, :2])
    return _fifth_bits(blocks[:, 2:6]) | _nibbles(blocks[:, 6:]), scales, 16 * scales


def _q5_1(blocks: Tensor) -> _Parts:
    """A scale, a minimum, the fifth bits, and 16 bytes with the lower four."""
    values = _fifth_bits(blocks[:, 4:8]) | _nibbles(blocks[:, 8:])
    return values, _halves(blocks[:, :2]), -_halves(blocks[:, 2:4])


def _q4_k(blocks: Tensor) -> _Parts:
    """Scales of scales and of minima, both of 8 groups, and 128 bytes."""
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> _Parts:
    """As Q4_K, with 32 bytes before the last 128, whose bit i belongs to group i."""
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> shifts & 1) << 4
    return _k_nibbles(blocks[:, 48:]) | fifth.flatten(1), *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> _Parts:
    """The lower four bits in 128 bytes, the upper two in 64, 16 signed scales, and their scale."""
    low = split_bytes(blocks[:, :128].view(-1, 2, 64)).movedim(-1, 2)  # [blocks, half, 2, 64]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3  # [blocks, half, 4, 32]
    values = low.reshape(-1, 2, 4, 32) | high << 4
    scales = blocks[:, 192:208].view(torch.int8).float() * _halves(blocks[:, 208:])
    return values.flatten(1), scales, 32 * scales


def _halves(pairs: Tensor) -> Tensor:
    """Float32 of float16 in two bytes each."""
    return pairs.contiguous().view(torch.float16).float()


def _nibbles(pairs: Tensor) -> Tensor:
    """The lower four bits of all bytes, then the upper."""
    return split_bytes(pairs).transpose(1, 2).flatten(1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """A bit per integer, as 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(1) << 4


def _k_nibbles(pairs: Tensor) -> Tensor:
    """The same for each 32 bytes."""
    return _nibbles(pairs.reshape(-1, 32)).view(len(pairs), -1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of 8 groups. Both are integers of six bits: the first four of each have
    their bits in one byte, the others have the upper two in the bytes of the first."""
    scales, minima, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    return (
        torch.cat([scales & 63, rest & 15 | scales >> 6 << 4], 1) * _halves(blocks[:, :2]),
        torch.cat([minima & 63, rest >> 4 | minima >> 6 << 4], 1) * _halves(blocks[:, 2:4]),
    )


# By the name of a type: bytes of a block, bits of the values, and the function that reads blocks.
_KINDS: Final[Mapping[str, tuple[int, Bits, Callable[[Tensor], _Parts]]]] = {
    "Q4_0": (18, 4, _q4_0),
    "Q4_1": (20, 4, _q4_1),
    "Q5_0": (22, 8, _q5_0),
    "Q5_1": (24, 8, _q5_1),
    "Q8_0": (34, 8, _q8_0),
    "Q4_K": (144, 4, _q4_k),
    "Q5_K": (176, 8, _q5_k),
    "Q6_K": (210, 8, _q6_k),
}
BLOCK_KINDS: Final = tuple(_KINDS)

"""Sizes of tiles: pure functions of the length of a row."""

from dataclasses import dataclass
from typing import Final

from kernels.gpu.launch import next_power_of_2

# Numbers of a thread: two vectors of 16 bytes in 32 bits, one in 16.
_THREAD_NUMBERS: Final = 8
_WARP_THREADS: Final = 32
_SMALLEST_TILE: Final = 1024
_MOST_WARPS: Final = 16
# 32 numbers of a thread: more do not fit into its registers.
MOST_NORM_NUMBERS: Final = 16_384


@dataclass(frozen=True)
class Tile:
    """What a program computes at once."""

    rows: int
    padded_dim: int  # a power of two
    num_warps: int


def norm_tile(dim: int) -> Tile:
    """Whole rows, of at most MOST_NORM_NUMBERS: they are read once."""
    return _tile_of(next_power_of_2(dim))


def rotation_tile(dim: int) -> Tile:
    """Halves of heads, of which a program has both."""
    return _tile_of(next_power_of_2(dim // 2), _SMALLEST_TILE // 2)


def activation_tile(dim: int) -> Tile:
    """A part of a row."""
    return _tile_of(min(next_power_of_2(dim), _SMALLEST_TILE))


def _tile_of(padded_dim: int, fewest_numbers: int = _SMALLEST_TILE) -> Tile:
    rows = max(fewest_numbers // padded_dim, 1)
    warps = rows * padded_dim // (_THREAD_NUMBERS * _WARP_THREADS)
    return Tile(rows, padded_dim, min(max(warps, 1), _MOST_WARPS))

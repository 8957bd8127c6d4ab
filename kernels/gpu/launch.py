"""Launch parameters: pure functions of the device and of values on the host.

There is no autotuning while serving: a search would stall the first request of each shape, and
could not run while a graph is captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch

# Rows of the smallest tile that tensor cores multiply.
_FEWEST_ROWS: Final = 16
_MOST_ROWS: Final = 128
_MOST_SINGLE_ROWS: Final = 32  # in single precision
# Of a program, besides queries, keys and values.
_OTHER_SHARED_BYTES: Final = 2048
# Programs per multiprocessor in decoding: a few waves, so that an incomplete last one costs little.
_DECODE_PROGRAMS: Final = 8
# Fewer keys are not worth a partition, whose sums are written and read again.
_FEWEST_PARTITION_KEYS: Final = 256
_MOST_PARTITIONS: Final = 128
# Bytes of keys, and again of values, per program of `kv_write`.
_WRITE_BYTES: Final = 8192


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that launches depend on."""

    capability: tuple[int, int]
    num_multiprocessors: int

    @property
    def shared_bytes(self) -> int:
        """The most shared memory of one program."""
        kib = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
        return 1024 * kib.get(self.capability, 99 if self.capability >= (8, 6) else 64)


# The interpreter uses the launches of an H200.
INTERPRETED: Final = Gpu(capability=(9, 0), num_multiprocessors=132)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The properties of a device; INTERPRETED if it is not a GPU."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Gpu((properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch parameters of `paged_attention`."""

    tile_rows: int  # query tokens times the heads that share a key head
    tile_keys: int
    num_warps: int
    num_stages: int  # of the pipeline that fetches keys and values
    # Of products in single precision: three products of 19-bit numbers are precise enough, run on
    # tensor cores, and take fewer registers than exact ones.
    precision: str = "tf32x3"


def decode_tile_rows(group_size: int, compute_dtype: torch.dtype, widest: int) -> int:
    """Rows of a tile for short queries: a token's heads, if they fit into one tile. `widest` is the
    larger of the heads' padded dimensions."""
    most = _MOST_ROWS
    if compute_dtype == torch.float32:
        most = _FEWEST_ROWS if widest > 128 else _MOST_SINGLE_ROWS
    return min(max(next_power_of_2(group_size), _FEWEST_ROWS), most)


def attention_launch(
    gpu: Gpu,
    padded_dims: tuple[int, int],
    compute_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    decode_rows: int,
    is_decode: bool,
) -> AttentionLaunch:
    """The launch for heads of `padded_dims` (of keys, of values). Tiles for short queries have
    `decode_rows` (`decode_tile_rows`), those for long ones at least as many.

    Chosen so that no register spills; tests check the compiled code.
    """
    widest = max(padded_dims)
    if compute_dtype == torch.float32:
        launch = _single_precision_launch(widest, decode_rows, is_decode)
    elif is_decode and decode_rows < _MOST_ROWS:
        # Memory is the bottleneck: many bytes are in-flight.
        keys = (64 if widest > 128 else 128) // cache_dtype.itemsize
        launch = AttentionLaunch(decode_rows, keys, 4 if decode_rows < 64 else 8, 4)
    else:
        # Wide tiles keep the tensor cores busy, which read them from shared memory. Addresses of
        # keys in many blocks, and of what has to be converted, take registers.
        keys = 32 if widest > 128 else 64
        if widest <= 64 or (widest == 128 and block_size % 128 == 0):
            keys = 128
        if cache_dtype != compute_dtype:
            keys = min(keys, 64)
        launch = AttentionLaunch(_MOST_ROWS, keys, 8, 3 if keys == 128 else 4)
    return _fitting(launch, gpu, padded_dims, compute_dtype)


def _single_precision_launch(widest: int, decode_rows: int, is_decode: bool) -> AttentionLaunch:
    rows = decode_rows if is_decode or widest > 128 else _MOST_SINGLE_ROWS
    keys = 16 if widest > 128 else 32
    return AttentionLaunch(rows, keys, 4 if rows == _FEWEST_ROWS else 8, 3)


def _fitting(
    launch: AttentionLaunch, gpu: Gpu, padded_dims: tuple[int, int], dtype: torch.dtype
) -> AttentionLaunch:
    """Reduce stages, then keys, until the launch fits into shared memory."""
    rows, keys = launch.tile_rows, launch.tile_keys
    stages = launch.num_stages
    query_bytes = rows * padded_dims[0] * dtype.itemsize
    while stages > 1 or keys > 16:
        fetched_bytes = keys * sum(padded_dims) * dtype.itemsize * stages
        if query_bytes + fetched_bytes + _OTHER_SHARED_BYTES <= gpu.shared_bytes:
            break
        if stages > 2 or keys == 16:
            stages -= 1
        else:
            keys //= 2
    return replace(launch, tile_keys=keys, num_stages=stages)


def num_partitions(gpu: Gpu, num_programs: int, max_keys: int) -> int:
    """The number of partitions of the keys of decoding sequences.

    `num_programs` is the number without partitions (sequences times tiles of heads), `max_keys` an
    upper bound of the keys of a sequence.
    """
    wanted = -(-_DECODE_PROGRAMS * gpu.num_multiprocessors // max(num_programs, 1))
    useful = -(-max_keys // _FEWEST_PARTITION_KEYS)
    return max(min(wanted, useful, _MOST_PARTITIONS), 1)


def fewest_partition_keys(partition_keys: int | None, tile_keys: int) -> int:
    """The fewest keys of a partition, a multiple of the tile; `partition_keys` if it is set."""
    return -(-(partition_keys or _FEWEST_PARTITION_KEYS) // tile_keys) * tile_keys


def stride_unit(strides: Sequence[int]) -> int:
    """A divisor of all strides, to be declared to the compiler: 8, or 1 if 8 is none, or if 16 is
    one, which Triton detects itself."""
    if all(stride % 16 == 0 for stride in strides):
        return 1
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def kv_write_rows(padded_dim: int, itemsize: int) -> int:
    """Rows, each a head of a token, per program of `kv_write`."""
    return max(next_power_of_2(_WRITE_BYTES // (padded_dim * itemsize)), 1)


def padded_dim(dim: int) -> int:
    """The dimension in a tile: a power of two that tensor cores support."""
    return max(next_power_of_2(dim), 16)


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()

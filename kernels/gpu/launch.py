"""How kernels are launched: plain functions of the device and of what the host knows.

Nothing here is measured while serving: a search would stall the first request of each shape, and
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
# Of a program, beside queries, keys and values.
_OTHER_SHARED_BYTES: Final = 2048
# Programs per multiprocessor that decoding wants: a few waves, so that the last one costs little.
_DECODE_PROGRAMS: Final = 8
# Fewer keys are not worth a partition: its sums are written, and read again.
_FEWEST_PARTITION_KEYS: Final = 256
_MOST_PARTITIONS: Final = 128
# What a program of `kv_write` moves of keys, and again of values.
_WRITE_BYTES: Final = 8192


@dataclass(frozen=True)
class Gpu:
    """What launches depend on."""

    capability: tuple[int, int]
    num_multiprocessors: int

    @property
    def shared_bytes(self) -> int:
        """The most shared memory of one program."""
        kib = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
        return 1024 * kib.get(self.capability, 99 if self.capability >= (8, 6) else 64)


# Launches of the interpreter are those of an H200.
INTERPRETED: Final = Gpu(capability=(9, 0), num_multiprocessors=132)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """INTERPRETED if the device is no GPU."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Gpu((properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True)
class AttentionLaunch:
    """Of the programs of `paged_attention`."""

    tile_rows: int  # query tokens times the heads that share a key head
    tile_keys: int
    num_warps: int
    num_stages: int  # of the pipeline that fetches keys and values
    # Of products in single precision: three products of 19-bit numbers lose nothing that counts,
    # run on tensor cores, and take a part of the registers of exact ones.
    precision: str = "tf32x3"


def decode_tile_rows(group_size: int, compute_dtype: torch.dtype, widest: int) -> int:
    """Rows of a tile for short queries: a token's heads, where one tile can hold them all.
    `widest` is the larger one of the heads' padded sizes."""
    most = _MOST_ROWS
    if compute_dtype == torch.float32:
        most = _FEWEST_ROWS if widest > 128 else _MOST_SINGLE_ROWS
    return min(max(_next_power_of_2(group_size), _FEWEST_ROWS), most)


def attention_launch(
    gpu: Gpu,
    padded_dims: tuple[int, int],
    compute_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    decode_rows: int,
    is_decode: bool,
) -> AttentionLaunch:
    """For heads of `padded_dims` (of keys, of values). Tiles for short queries have `decode_rows`
    (`decode_tile_rows`), those for long ones at least as many.

    Chosen so that nothing spills from registers; what was compiled is in the tests.
    """
    widest = max(padded_dims)
    if compute_dtype == torch.float32:
        launch = _single_precision_launch(widest, decode_rows, is_decode)
    elif is_decode and decode_rows < _MOST_ROWS:
        # Memory's time alone counts: many bytes in flight.
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
    """The same with fewer stages, then with fewer keys, until it fits into shared memory."""
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
    """Into how many parts the keys of decoding sequences are cut.

    `num_programs` is the number without any cut (sequences times tiles of heads), `max_keys` bounds
    the keys of a sequence.
    """
    wanted = -(-_DECODE_PROGRAMS * gpu.num_multiprocessors // max(num_programs, 1))
    useful = -(-max_keys // _FEWEST_PARTITION_KEYS)
    return max(min(wanted, useful, _MOST_PARTITIONS), 1)


def fewest_partition_keys(partition_keys: int | None, tile_keys: int) -> int:
    """Of a part; a multiple of the tile. `partition_keys` is a caller's wish."""
    return -(-(partition_keys or _FEWEST_PARTITION_KEYS) // tile_keys) * tile_keys


def stride_unit(strides: Sequence[int]) -> int:
    """What a kernel is to know that it divides all strides, beyond what the compiler finds out for
    itself, which is multiples of 16."""
    if all(stride % 16 == 0 for stride in strides):
        return 1
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def kv_write_rows(padded_dim: int, itemsize: int) -> int:
    """Rows (a head of a token each) of one program of `kv_write`."""
    return max(_next_power_of_2(_WRITE_BYTES // (padded_dim * itemsize)), 1)


def padded_dim(dim: int) -> int:
    """Of a tile: a power of two that tensor cores multiply."""
    return max(_next_power_of_2(dim), 16)


def _next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()

"""Writes to a paged cache, and copies of its blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.limits import Limits
from benchmarks.kernels.timing import best_seconds
from benchmarks.report import Cell, Column, Part
from kernels.blocks import copy_blocks, swap_blocks, swap_blocks_reference
from kernels.kv_write import kv_write, kv_write_reference

_HEADS, _HEAD_DIM, _BLOCK_SIZE, _LAYERS = 4, 64, 16, 8
# Bytes moved to copy one block in all layers: float32 keys and values, read and written once.
_COPY_BYTES = 2 * 2 * _LAYERS * _BLOCK_SIZE * _HEADS * _HEAD_DIM * 4
_ROUNDS = 10
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

Row = dict[str, Cell]


def cache_operations(limits: Limits) -> Part:
    writes = [_write_row(limits, dtype) for dtype in _DTYPES]
    return Part(
        name="cache",
        title="Writes to the cache, and copies of blocks",
        notes=[
            "*MB* are bytes read and written. *Of limit* is their rate as a share of the rate at "
            "which a sum over an array is read by the same threads. *Torch*: the time of torch's "
            "operations over that of the kernel. Both caches of swap_blocks are in host memory."
        ],
        columns=[
            Column("what", "operation"),
            Column("ms", "ms", ".2f"),
            Column("mb", "MB", ".0f"),
            Column("gbs", "GB/s", ".1f"),
            Column("of_limit", "of limit", ".2f"),
            Column("of_torch", "torch", ".2f"),
        ],
        rows=[*writes, _copy_row(limits), _swap_row(limits)],
        targets=[],
    )


def _write_row(limits: Limits, dtype: torch.dtype) -> Row:
    token_bytes = _HEADS * _HEAD_DIM * (4 + dtype.itemsize)
    num_tokens = limits.enough(2 * _BLOCK_SIZE * token_bytes) * _BLOCK_SIZE
    states = torch.randn(2, num_tokens, _HEADS, _HEAD_DIM)
    caches = torch.zeros(2, num_tokens // _BLOCK_SIZE, _BLOCK_SIZE, _HEADS, _HEAD_DIM, dtype=dtype)
    slots = torch.randperm(num_tokens)
    return _row(
        limits,
        f"kv_write of {num_tokens} tokens, float32 to {str(dtype)[6:]}",
        lambda: kv_write(states[0], states[1], caches[0], caches[1], slots),
        lambda: kv_write_reference(states[0], states[1], caches[0], caches[1], slots),
        2 * num_tokens * token_bytes,
    )


def _copy_row(limits: Limits) -> Row:
    """Copy half of the blocks onto the other half, in all layers."""
    num_copied = limits.enough(_COPY_BYTES)
    layers = _layers(2 * num_copied)
    ids = torch.randperm(2 * num_copied).view(2, -1)
    return _row(
        limits,
        f"copy_blocks of {num_copied} blocks in {_LAYERS} layers",
        lambda: copy_blocks(layers, ids[0], ids[1]),
        lambda: swap_blocks_reference(layers, layers, ids[0], ids[1]),
        num_copied * _COPY_BYTES,
    )


def _swap_row(limits: Limits) -> Row:
    """Copy all blocks of one cache to another, in all layers."""
    num_copied = limits.enough(_COPY_BYTES)
    sources, destinations = _layers(num_copied), _layers(num_copied)
    ids = torch.stack([torch.randperm(num_copied) for _ in range(2)])
    return _row(
        limits,
        f"swap_blocks of {num_copied} blocks in {_LAYERS} layers",
        lambda: swap_blocks(sources, destinations, ids[0], ids[1]),
        lambda: swap_blocks_reference(sources, destinations, ids[0], ids[1]),
        num_copied * _COPY_BYTES,
    )


def _layers(num_blocks: int) -> list[Tensor]:
    """Return caches of keys and values, `[num_blocks, block_size, num_kv_heads, head_dim]` each."""
    size = (num_blocks, _BLOCK_SIZE, _HEADS, _HEAD_DIM)
    return [torch.randn(size) for _ in range(2 * _LAYERS)]


def _row(
    limits: Limits,
    what: str,
    ours: Callable[[], object],
    torch_s: Callable[[], object],
    num_bytes: int,
) -> Row:
    functions = {"ours": ours, "torch": torch_s, "limit": limits.read}
    seconds = best_seconds(functions, _ROUNDS)
    rate = num_bytes / seconds["ours"] / 1e9
    return {
        "what": what,
        "ms": 1000 * seconds["ours"],
        "mb": num_bytes / 1e6,
        "gbs": rate,
        "of_limit": rate / limits.gigabytes_per_s(seconds["limit"]),
        "of_torch": seconds["torch"] / seconds["ours"],
    }

"""Copies whole blocks of caches in Triton, as bytes, all layers in one launch.

The kernel takes addresses of caches, so that either side may be pinned host memory, which a GPU
accesses directly.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 2048  # words that a program copies at a time
# Bytes that a thread copies at once, if all blocks are aligned to them.
_VECTOR_BYTES: Final = 16
_WORD_BYTES: Final = 4
_MAX_SPLITS: Final = 16  # of one block of one cache
# A few programs per multiprocessor of a large GPU. Fewer saturate a link to the host, and leave the
# other multiprocessors to computation.
_DEVICE_PROGRAMS: Final = 2048
_LINK_PROGRAMS: Final = 64

# Per cache: the addresses of source and destination, and the bytes of a block.
Table = tuple[tuple[int, int, int], ...]


def copy_blocks_triton(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    source_ids: Tensor,
    destination_ids: Tensor,
) -> None:
    """As `swap_blocks`, on the current stream. Caches are contiguous, on one device or in pinned
    memory; ids are on the host."""
    _require_within(source_ids, sources)
    _require_within(destination_ids, destinations)
    if not len(source_ids) or not sources:
        return
    if _is_read_and_written(sources, destinations, source_ids, destination_ids):
        staged = [source.new_empty(len(source_ids), *source.shape[1:]) for source in sources]
        places = torch.arange(len(source_ids))
        _copy(sources, staged, source_ids, places)
        _copy(staged, destinations, places, destination_ids)
    else:
        _copy(sources, destinations, source_ids, destination_ids)


def _require_within(block_ids: Tensor, caches: Sequence[Tensor]) -> None:
    """IndexError if a cache lacks a block: on a GPU the access would end the process."""
    num_blocks = min((len(cache) for cache in caches), default=0)
    if len(block_ids) and not (block_ids.min() >= 0 and block_ids.max() < num_blocks):
        raise IndexError(f"blocks must be 0 to {num_blocks - 1}: {block_ids.tolist()}")


def _is_read_and_written(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    source_ids: Tensor,
    destination_ids: Tensor,
) -> bool:
    """Whether a block is both source and destination, and might be written before it is read."""
    if sources[0].data_ptr() != destinations[0].data_ptr():
        return False
    return bool(torch.isin(source_ids, destination_ids).any())


def _copy(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    source_ids: Tensor,
    destination_ids: Tensor,
) -> None:
    device = next((c.device for c in (*sources, *destinations) if c.is_cuda), sources[0].device)
    _require_same_blocks(sources, destinations)
    table = tuple(
        (source.data_ptr(), destination.data_ptr(), source[0].nbytes)
        for source, destination in zip(sources, destinations, strict=True)
    )
    aligned = all(number % _VECTOR_BYTES == 0 for entry in table for number in entry)
    word_bytes = _WORD_BYTES if aligned else 1
    words = max(block_bytes for _, _, block_bytes in table) // word_bytes
    is_within = sources[0].device == destinations[0].device
    num_moves = len(source_ids) * len(table)
    _copy_kernel[_grid(num_moves, words, is_within)](
        _on_device(table, device),
        _moved(source_ids, destination_ids, device),
        len(source_ids),
        num_moves,
        WORD_BYTES=word_bytes,
        BLOCK=_BLOCK,
    )


def _require_same_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
            raise ValueError("a cache and its destination must have blocks of the same kind")
        if not (source.is_contiguous() and destination.is_contiguous()):
            raise ValueError("caches must be contiguous")


def _grid(num_moves: int, words: int, is_within: bool) -> tuple[int, int]:
    """Programs, and splits of each block: more splits if there are fewer blocks."""
    programs = _DEVICE_PROGRAMS if is_within else _LINK_PROGRAMS
    moves = min(num_moves, programs)
    splits = min(_MAX_SPLITS, triton.cdiv(words, _BLOCK), programs // moves)
    return moves, splits


@lru_cache(maxsize=16)
def _on_device(table: Table, device: torch.device) -> Tensor:
    """The table as int64 `[num_caches, 3]`, sent once: caches live as long as their worker."""
    return _sent(torch.tensor(table, dtype=torch.int64), device)


def _moved(source_ids: Tensor, destination_ids: Tensor, device: torch.device) -> Tensor:
    """Send both ids to the device, int64 `[2, num_moves]`."""
    return _sent(torch.stack([source_ids, destination_ids]), device)


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Send numbers to the device without waiting."""
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_blocks", "num_moves"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    table, ids, num_blocks, num_moves, WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy blocks of caches, one after another, or one split of each."""
    word: tl.constexpr = tl.int32 if WORD_BYTES == 4 else tl.int8
    splits = tl.num_programs(1)
    for move in range(tl.program_id(0), num_moves, tl.num_programs(0)):
        entry = table + (move // num_blocks) * 3
        number = ids + move % num_blocks
        words = tl.load(entry + 2) // WORD_BYTES
        source_offset = tl.load(number) * words
        destination_offset = tl.load(number + num_blocks) * words
        if WORD_BYTES == 4:
            words = tl.multiple_of(words, 4)
            source_offset = tl.multiple_of(source_offset, 4)
            destination_offset = tl.multiple_of(destination_offset, 4)
        source = tl.load(entry).to(tl.pointer_type(word))
        destination = tl.load(entry + 1).to(tl.pointer_type(word))
        if WORD_BYTES == 4:
            source = tl.multiple_of(source, 16)
            destination = tl.multiple_of(destination, 16)
        for first in range(tl.program_id(1) * BLOCK, words, splits * BLOCK):
            places = first + tl.arange(0, BLOCK)
            inside = places < words
            copied = tl.load(source + source_offset + places, mask=inside)
            tl.store(destination + destination_offset + places, copied, mask=inside)

"""Copies whole blocks of caches, all layers in one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, Implementation, choose

if HAS_TRITON:
    from kernels.gpu.blocks import copy_blocks_triton


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A cache with undefined contents."""
    return torch.empty(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)


def copy_blocks(
    caches: Sequence[Tensor],
    source_ids: Tensor,
    destination_ids: Tensor,
    *,
    implementation: Implementation | None = None,
) -> None:
    """Copy blocks within each cache. Ids are int64 on the host; destinations are distinct.

    All sources are read before a destination is written.
    """
    swap_blocks(caches, caches, source_ids, destination_ids, implementation=implementation)


def swap_blocks(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    source_ids: Tensor,
    destination_ids: Tensor,
    *,
    implementation: Implementation | None = None,
) -> None:
    """Copy blocks from each source to the destination of the same index, which may be on another
    device. Otherwise as `copy_blocks`.

    On a GPU the copy is enqueued on the current stream. Pinned host memory must not be accessed
    until the copy is done.
    """
    if implementation is None:
        implementation = _choose([*sources, *destinations])
    if implementation == Implementation.TRITON:
        copy_blocks_triton(sources, destinations, source_ids, destination_ids)
    elif not implementation.is_cpp:
        swap_blocks_reference(sources, destinations, source_ids, destination_ids)
    else:
        torch.ops.quire.copy_blocks(sources, destinations, source_ids, destination_ids)


def swap_blocks_reference(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    source_ids: Tensor,
    destination_ids: Tensor,
) -> None:
    """The reference of `swap_blocks`."""
    for source, destination in zip(sources, destinations, strict=True):
        blocks = source[source_ids.to(source.device)]
        destination[destination_ids.to(destination.device)] = blocks.to(destination.device)


def _choose(caches: Sequence[Tensor]) -> Implementation:
    devices = {cache.device.type for cache in caches}
    # A GPU accesses pinned host memory directly.
    if devices == {"cuda", "cpu"} and all(cache.is_cuda or cache.is_pinned() for cache in caches):
        devices = {"cuda"}
    # Copies are independent of the dtype.
    return choose(devices.pop(), ()) if len(devices) == 1 else Implementation.TORCH

"""The paged KV cache: its number of blocks, and the blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
import structlog
import torch
from torch import Tensor

from kernels.blocks import copy_blocks, empty_cache
from kernels.swap_space import SwapSpace
from worker_svc.cache.pool_size import PoolSize, host_blocks, require_capacity
from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import BlockMoves, PlanError

log = structlog.get_logger()

# By the values of the setting `kv_cache_dtype`; `auto` is the model's own.
_CACHE_DTYPES: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class AttentionSpec:
    """Keys and values of one token in one attention layer, and how its scores are modified."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype  # of keys and values in the model, or in the cache
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


AttentionSpecs = tuple[AttentionSpec, ...]


def with_cache_dtype(layers: AttentionSpecs, kv_cache_dtype: str) -> AttentionSpecs:
    """The layers with the dtype of their cache."""
    if kv_cache_dtype == "auto":
        return layers
    return tuple(replace(layer, dtype=_CACHE_DTYPES[kv_cache_dtype]) for layer in layers)


def block_bytes_of(layers: AttentionSpecs, block_size: int) -> int:
    """Bytes of one block in all layers."""
    return block_size * sum(layer.token_bytes for layer in layers)


def size_pool(
    layers: AttentionSpecs,
    block_size: int,
    max_model_len: int,
    kv_cache_memory: int,
    num_blocks: int | None,
    swap_space: int,
) -> PoolSize:
    """The blocks that fit into the memory (bytes), or `num_blocks` if that is set.

    WrongSettingError, with both numbers, if the longest sequence does not fit, or no block into
    the swap space.
    """
    block_bytes = block_bytes_of(layers, block_size)
    chosen = kv_cache_memory // block_bytes if num_blocks is None else num_blocks
    num_host_blocks = host_blocks(swap_space, block_bytes)
    log.info(
        "key-value cache",
        block_size=block_size,
        num_layers=len(layers),
        layers=_summary(layers),
        token_bytes=block_bytes // block_size,
        block_bytes=block_bytes,
        kv_cache_memory=kv_cache_memory,
        num_blocks=chosen,
        cache_bytes=chosen * block_bytes,
        swap_space=swap_space,
        num_host_blocks=num_host_blocks,
    )
    require_capacity(chosen, block_size, max_model_len)
    return PoolSize(chosen, num_host_blocks)


def _summary(layers: AttentionSpecs) -> list[str]:
    """Equal layers once, with their count: `28 x 8 heads x (128 + 128) x float32`."""
    return [
        f"{layers.count(shape)} x {shape.num_kv_heads} heads x "
        f"({shape.key_dim} + {shape.value_dim}) x {dtype_name(shape.dtype)}"
        for shape in dict.fromkeys(layers)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


class KvPool:
    """Keys and values of every layer, on the device and, for swapped blocks, on the host."""

    def __init__(
        self,
        layers: AttentionSpecs,
        size: PoolSize,
        block_size: int,
        device: torch.device,
        before_moves: Callable[[BlockMoves, BlockMoves, BlockMoves], object] | None = None,
    ) -> None:
        """`before_moves` is called with the arguments of `move`, if they are valid."""
        self.size = size
        self._before_moves = before_moves
        self.block_size = block_size
        self.dtype = layers[0].dtype
        self.layers = _allocate(layers, size.num_blocks, block_size, device)
        self._caches = list(chain.from_iterable(self.layers))
        self._host = SwapSpace(self._caches, size.num_host_blocks)

    def move(self, swap_outs: BlockMoves, swap_ins: BlockMoves, copies: BlockMoves) -> None:
        """Device to host, host to device, device to device, in this order; each reads all its
        sources before it writes. PlanError before any move if one of them is invalid."""
        self._check(swap_outs, swap_ins, copies)
        if self._before_moves is not None:
            self._before_moves(swap_outs, swap_ins, copies)
        self._host.swap_out(*_ids(swap_outs))
        self._host.swap_in(*_ids(swap_ins))
        if len(copies.sources):
            self._host.wait_for(copies.destinations.tolist())
            copy_blocks(self._caches, *_ids(copies))

    def wait_for_swap_outs(self, slot_mapping: Ints) -> None:
        """Wait for copies to the host that still read the blocks of these slots. -1 is no slot.
        To be called before a step writes."""
        if self._host.is_swapping_out:
            self._host.wait_for(np.unique(slot_mapping // self.block_size).tolist())

    def warm_up(self) -> None:
        """Compile the kernels that move blocks. Uses the null block and an unused host block."""
        first = torch.zeros(1, dtype=torch.int64)
        copy_blocks(self._caches, first, first)
        if self.size.num_host_blocks:
            self._host.swap_out(first, first)
            self._host.wait_for([0])

    def _check(self, swap_outs: BlockMoves, swap_ins: BlockMoves, copies: BlockMoves) -> None:
        """An index out of range would destroy the GPU's context."""
        if len(swap_outs.sources) and len(swap_ins.sources):
            raise PlanError("blocks are swapped out and in by one plan")
        for ids in (swap_outs.sources, swap_ins.destinations, copies.sources, copies.destinations):
            _require_within(ids, 1, self.size.num_blocks)
        for ids in (swap_outs.destinations, swap_ins.sources):
            _require_within(ids, 0, self.size.num_host_blocks)


def _require_within(block_ids: Ints, first: int, end: int) -> None:
    if len(block_ids) and not (block_ids.min() >= first and block_ids.max() < end):
        raise PlanError(f"blocks to move must be {first} to {end - 1}, not {block_ids.tolist()}")


def _ids(moves: BlockMoves) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(moves.sources), torch.from_numpy(moves.destinations)


def _allocate(
    layers: AttentionSpecs, num_blocks: int, block_size: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values per layer."""

    def cache(shape: AttentionSpec, head_dim: int) -> Tensor:
        return empty_cache(
            num_blocks, block_size, shape.num_kv_heads, head_dim, shape.dtype, device
        )

    caches = [(cache(shape, shape.key_dim), cache(shape, shape.value_dim)) for shape in layers]
    if device.type == "cpu":
        # The first write to a page faults. No request should pay for that, and a lack of memory
        # should show now and not under load. One call, so that another thread may have the
        # interpreter meanwhile.
        torch._foreach_zero_([*chain.from_iterable(caches)])
    return caches

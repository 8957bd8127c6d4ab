"""Writes the keys and values of new tokens into their slots of a paged cache."""

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, Implementation, choose

if HAS_TRITON:
    from kernels.gpu.kv_write import kv_write_triton


def kv_write_reference(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """The reference of `kv_write`."""
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[written]
    for source, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        entries = _quantised(source[written], cache.dtype, scale)
        # As bytes: not all torch operations support 8-bit floats.
        if cache.dtype.itemsize == 1:
            cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
        cache.flatten(0, 1).index_copy_(0, slots, entries)


def _quantised(states: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`states / scale` in the dtype of a cache; in 8 bits, numbers that are too large saturate."""
    if states.dtype == dtype and scale == 1.0:
        return states
    scaled = states.float() / scale
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        scaled = scaled.clamp(-largest, largest)
    return scaled.to(dtype)


def kv_write(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    implementation: Implementation | None = None,
) -> None:
    """Write `key` and `value [num_tokens, num_kv_heads, head_dim]` into the slots of their tokens.

    The caches are `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of the same
    dtype; they get `key / k_scale` and `value / v_scale`, rounded to nearest, saturating in 8 bits.
    `slot_mapping [num_tokens]` is int64 with distinct slots; a token of slot -1 is not written.
    """
    if implementation is None:
        implementation = choose(key.device.type, (key.dtype, k_cache.dtype))
    if implementation.is_cpp:
        torch.ops.quire.kv_write(
            key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, implementation.isa
        )
        return
    function = kv_write_reference
    if implementation == Implementation.TRITON:
        function = kv_write_triton
    function(key, value, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)

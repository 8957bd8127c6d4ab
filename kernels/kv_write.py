"""Writes the keys and values of new tokens into their slots of a paged cache."""

from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from kernels.choice import Implementation, choose

# Elsewhere than on Linux, and in images without a GPU, it is not installed.
HAS_TRITON: Final = find_spec("triton") is not None

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _kv_write_kernel(  # type: ignore[no-untyped-def]
        source,
        cache,
        slot_mapping,
        source_token_stride,
        source_head_stride,
        cache_slot_stride,
        num_heads,
        head_dim,
        HEADS: tl.constexpr,  # noqa: N803
        DIM: tl.constexpr,  # noqa: N803
    ):
        """One program copies one token: a tile of `num_heads` x `head_dim`."""
        # Ids times strides pass 2^31 in a large pool.
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            heads = tl.arange(0, HEADS)[:, None]
            dims = tl.arange(0, DIM)[None, :]
            inside = (heads < num_heads) & (dims < head_dim)
            source += token * source_token_stride
            tile = tl.load(source + heads * source_head_stride + dims, mask=inside)
            tl.store(cache + slot * cache_slot_stride + heads * head_dim + dims, tile, mask=inside)

    def kv_write_triton(
        key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """The Triton form of `kv_write`. The last dimension of key and value is dense."""
        for source, cache in ((key, k_cache), (value, v_cache)):
            num_tokens, num_heads, head_dim = source.shape
            _kv_write_kernel[(num_tokens,)](
                source,
                cache,
                slot_mapping,
                source.stride(0),
                source.stride(1),
                cache.stride(1),
                num_heads,
                head_dim,
                HEADS=triton.next_power_of_2(num_heads),
                DIM=triton.next_power_of_2(head_dim),
            )


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
    """The obvious twin of `kv_write`."""
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[written]
    for source, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        entries = _quantised(source[written], cache.dtype, scale)
        # Bytes: not all of torch's operations know 8-bit numbers.
        if cache.dtype.itemsize == 1:
            cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
        cache.flatten(0, 1).index_copy_(0, slots, entries)


def _quantised(states: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`states / scale` in the dtype of a cache; what is too large for 8 bits becomes the largest
    number there is."""
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
    """Writes `key` and `value [num_tokens, num_kv_heads, head_dim]` into the slots of their tokens.

    The caches are `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of the same
    dtype; they get `key / k_scale` and `value / v_scale`, rounded to the nearest, and in 8 bits
    bounded by the largest number there is. `slot_mapping [num_tokens]` is int64, no slot twice; a
    token of slot -1 is not written.
    """
    if implementation is None:
        implementation = choose(key.device.type, (key.dtype, k_cache.dtype))
    copied = key.dtype == k_cache.dtype and k_scale == v_scale == 1.0
    if implementation.is_cpp:
        torch.ops.quire.kv_write(
            key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, implementation.isa
        )
    elif HAS_TRITON and k_cache.is_cuda and copied:
        kv_write_triton(key, value, k_cache, v_cache, slot_mapping)
    else:
        kv_write_reference(
            key, value, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale
        )

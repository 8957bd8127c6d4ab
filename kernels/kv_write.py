"""Writes the keys and values of new tokens into their slots of a paged cache."""

from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

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
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """The plain torch form of `kv_write`."""
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    for source, cache in ((key, k_cache), (value, v_cache)):
        cache.flatten(0, 1).index_copy_(0, slot_mapping[written], source[written])


def kv_write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Copies `key` and `value [num_tokens, num_kv_heads, head_dim]` into the slots of their tokens.

    The caches are `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of the same
    dtype. `slot_mapping [num_tokens]` is int64, no slot twice; a token of slot -1 is not written.
    """
    if HAS_TRITON and k_cache.is_cuda:
        kv_write_triton(key, value, k_cache, v_cache, slot_mapping)
    else:
        kv_write_reference(key, value, k_cache, v_cache, slot_mapping)


def copy_blocks(
    source: Tensor, destination: Tensor, source_ids: Tensor, destination_ids: Tensor
) -> None:
    """Copies whole blocks between two caches, or within one; they may be on different devices.

    All sources are read before a destination is written.
    """
    blocks = source[source_ids.to(source.device)]
    destination[destination_ids.to(destination.device)] = blocks.to(destination.device)


def empty_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A cache whose contents mean nothing until written."""
    return torch.empty(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)

"""Arguments of `kv_write`."""

import torch

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# Tokens, heads, and the sizes of keys and of values.
SIZES = [(1, 1, 1, 1), (7, 3, 5, 8), (13, 2, 16, 9), (100, 2, 64, 300)]


def kv_write_case(
    num_tokens: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.float32,
    block_size: int = 5,
) -> Case:
    """Keys as models give them: heads before tokens in memory. Every third slot is -1."""
    draw = torch.Generator().manual_seed(num_tokens)
    key = torch.randn(num_heads, num_tokens, key_dim, generator=draw).transpose(0, 1)
    value = torch.randn(num_tokens, num_heads, value_dim, generator=draw)
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=draw)[:num_tokens]
    slots[1::3] = -1
    caches = [
        torch.full((num_blocks, block_size, num_heads, dim), torch.nan).to(cache_dtype)
        for dim in (key_dim, value_dim)
    ]
    return key.to(dtype), value.to(dtype), caches[0], caches[1], slots


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

"""Prints, as JSON, what the launches of attention and of cache writes become for a GPU that is not
there. To be run without TRITON_INTERPRET: `python -m compiled_attention`.

All tensors are without data: a launch that asked the device for a number would fail.
"""

import json
from itertools import product
from typing import Any

import torch
from compiled_kernels import Compiled, Recorder

from kernels.gpu import attention, kv_write
from kernels.paged_batch import PagedBatch

_NUM_HEADS, _NUM_KV_HEADS, _NUM_SEQS, _SEQ_LEN = 32, 8, 16, 4096
_ALL_FEATURES: dict[str, Any] = {
    "sliding_window": 512,
    "softcap": 50.0,
    "alibi_slopes": torch.empty(_NUM_HEADS, device="meta"),
    "sinks": torch.empty(_NUM_HEADS, device="meta"),
}


def attend(
    query_len: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    options: dict[str, Any],
    num_seqs: int = _NUM_SEQS,
    seq_len: int = _SEQ_LEN,
) -> None:
    query = torch.empty(num_seqs * query_len, _NUM_HEADS, head_dim, dtype=dtype)
    cache = torch.empty(2, block_size, _NUM_KV_HEADS, head_dim, dtype=cache_dtype)
    batch = PagedBatch(
        block_table=torch.empty(num_seqs, -(-seq_len // block_size), dtype=torch.int32),
        query_start_loc=torch.empty(num_seqs + 1, dtype=torch.int64),
        seq_lens=torch.empty(num_seqs, dtype=torch.int64),
        block_size=block_size,
        max_query_len=query_len,
        max_seq_len=seq_len,
    )
    attention.paged_attention_triton(
        query, cache, cache, batch, scale=0.1, out=torch.empty_like(query), **options
    )


def write(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    num_tokens: int = 512,
) -> None:
    # As models give keys and values: heads before tokens.
    states = torch.empty(num_heads, num_tokens, head_dim, dtype=dtype).transpose(0, 1)
    cache = torch.empty(40, 16, num_heads, head_dim, dtype=cache_dtype)
    slots = torch.empty(num_tokens, dtype=torch.int64)
    kv_write.kv_write_triton(states, states, cache, cache, slots)


def serve_steps_of_many_sizes() -> None:
    """Prompts and decoding sequences, few and many, short and long."""
    for num_seqs, query_len, seq_len in (
        *((1, 1, 9), (1, 1, 5000), (3, 1, 700), (16, 1, 1600), (300, 1, 900)),
        *((1, 15, 15), (1, 512, 4000), (7, 33, 100), (5, 16, 1616), (2, 1, 16)),
    ):
        attend(query_len, torch.bfloat16, torch.bfloat16, 128, 16, {}, num_seqs, seq_len)
        write(torch.bfloat16, torch.bfloat16, 8, 128, num_seqs * query_len)


def described(compiled: Compiled, **what: Any) -> dict[str, Any]:
    return {**vars(compiled), **{name: str(value) for name, value in what.items()}}


def main() -> None:
    compiled: list[Compiled] = []
    for module, name in (
        (attention, "paged_attention_kernel"),
        (attention, "merge_partitions_kernel"),
        (kv_write, "_kv_write_kernel"),
    ):
        setattr(module, name, Recorder(getattr(module, name), compiled))
    found = []
    half, eight = torch.bfloat16, torch.float8_e4m3fn
    formats = [(half, half), (half, eight), (torch.float32, torch.float32)]
    for (dtype, cache_dtype), head_dim, block_size, query_len, options in product(
        formats, (64, 128, 256), (16, 256), (1, 512), ({}, _ALL_FEATURES)
    ):
        if options and (head_dim != 128 or dtype == torch.float32):
            continue
        compiled.clear()
        attend(query_len, dtype, cache_dtype, head_dim, block_size, options)
        found += [
            described(
                each,
                cache_dtype=cache_dtype,
                head_dim=head_dim,
                block_size=block_size,
                query_len=query_len,
            )
            for each in compiled
        ]
    for dtype, cache_dtype, num_heads, head_dim in (
        (half, half, 8, 128),
        (half, eight, 8, 128),
        (half, torch.float8_e5m2, 5, 64),
        (torch.float16, torch.float16, 5, 80),
    ):
        compiled.clear()
        write(dtype, cache_dtype, num_heads, head_dim)
        found += [described(each, cache_dtype=cache_dtype, head_dim=head_dim) for each in compiled]
    compiled.clear()
    serve_steps_of_many_sizes()
    found += [described(each, steps="many") for each in compiled]
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.device("meta"):
        main()

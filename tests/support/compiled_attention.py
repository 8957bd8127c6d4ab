"""Prints, as JSON, what the launches of attention and of cache writes become for a GPU that is not
there. To be run without TRITON_INTERPRET: `python -m compiled_attention`.

All tensors are without data: a launch that read a number from the device would fail.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from compiled_kernels import Compiled, Recorder

from kernels.gpu import attention, kv_write
from kernels.inputs.attention_options import AttentionOptions
from kernels.inputs.paged_batch import PagedBatch

_NUM_HEADS, _NUM_KV_HEADS, _NUM_SEQS, _SEQ_LEN = 32, 8, 16, 4096
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CACHE_DTYPES = (*_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
_ALL_FEATURES: dict[str, Any] = {
    "sliding_window": 512,
    "softcap": 50.0,
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
    v_head_dim: int | None = None,
    num_heads: int = _NUM_HEADS,
) -> None:
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    query = torch.empty(num_seqs * query_len, num_heads, head_dim, dtype=dtype)
    out = torch.empty(num_seqs * query_len, num_heads, v_head_dim, dtype=dtype)
    k_cache, v_cache = (
        torch.empty(2, block_size, _NUM_KV_HEADS, dim, dtype=cache_dtype)
        for dim in (head_dim, v_head_dim)
    )
    batch = PagedBatch(
        block_table=torch.empty(num_seqs, -(-seq_len // block_size), dtype=torch.int32),
        query_start_loc=torch.empty(num_seqs + 1, dtype=torch.int64),
        seq_lens=torch.empty(num_seqs, dtype=torch.int64),
        block_size=block_size,
        max_query_len=query_len,
        max_seq_len=seq_len,
    )
    attention.paged_attention_triton(
        query, k_cache, v_cache, batch, AttentionOptions(scale=0.1, **options), out
    )


def write(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_heads: int,
    head_dim: int,
    num_tokens: int = 512,
    scale: float = 1.0,
) -> None:
    # As models give keys and values: heads before tokens.
    states = torch.empty(num_heads, num_tokens, head_dim, dtype=dtype).transpose(0, 1)
    cache = torch.empty(40, 16, num_heads, head_dim, dtype=cache_dtype)
    slots = torch.empty(num_tokens, dtype=torch.int64)
    scales = {"k_scale": scale, "v_scale": scale}
    kv_write.kv_write_triton(states, states, cache, cache, slots, **scales)


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


def launches() -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
    """Launches, each with the attributes by which tests find it."""
    half, eight = torch.bfloat16, torch.float8_e4m3fn
    formats = [(half, half), (half, eight), (torch.float32, torch.float32)]
    for (dtype, cache_dtype), head_dim, block_size, query_len, options in product(
        formats, (64, 128, 256), (16, 256), (1, 512), ({}, _ALL_FEATURES)
    ):
        if options and (head_dim != 128 or dtype == torch.float32):
            continue
        what = {"cache_dtype": cache_dtype, "head_dim": head_dim, "query_len": query_len}
        yield (
            what | {"block_size": block_size},
            partial(attend, query_len, dtype, cache_dtype, head_dim, block_size, options),
        )
    # Heads that are multiples of 8 and not of 16, and keys that are wider than values.
    for cache_dtype, (head_dim, v_head_dim), query_len in product(
        (half, eight), ((72, 72), (120, 120), (192, 128)), (1, 512)
    ):
        what = {"cache_dtype": cache_dtype, "head_dim": head_dim, "query_len": query_len}
        call = partial(attend, query_len, half, cache_dtype, head_dim, 16, {})
        yield what, partial(call, v_head_dim=v_head_dim)
    # As in gpt-oss.
    for window, query_len in product((None, 128), (1, 512)):
        what = {"cache_dtype": half, "head_dim": 64, "query_len": query_len}
        options = {"sliding_window": window, "sinks": torch.empty(64, dtype=half)}
        call = partial(attend, query_len, half, half, 64, 16, options)
        yield what | {"sinks": half, "window": window}, partial(call, num_heads=64)
    for dtype, cache_dtype, scale in product(_DTYPES, _CACHE_DTYPES, (1.0, 0.5)):
        what = {"dtype": dtype, "cache_dtype": cache_dtype, "head_dim": 128, "scale": scale}
        yield what, partial(write, dtype, cache_dtype, 8, 128, scale=scale)
    for cache_dtype, head_dim in ((torch.float8_e5m2, 64), (half, 80)):
        what = {"cache_dtype": cache_dtype, "head_dim": head_dim}
        yield what, partial(write, half, cache_dtype, 5, head_dim)
    yield {"steps": "many"}, serve_steps_of_many_sizes


def main() -> None:
    compiled: list[Compiled] = []
    for module, name in (
        (attention, "paged_attention_kernel"),
        (attention, "merge_partitions_kernel"),
        (kv_write, "_kv_write_kernel"),
    ):
        setattr(module, name, Recorder(getattr(module, name), compiled))
    found = []
    for what, launch in launches():
        compiled.clear()
        launch()
        found += [described(each, **what) for each in compiled]
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.device("meta"):
        main()

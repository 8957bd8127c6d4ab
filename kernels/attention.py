"""Attention over a paged cache, for a ragged batch of queries.

A cache is `[num_blocks, block_size, num_kv_heads, head_dim]`; `PagedBatch` locates the keys
of each query. A step's own keys and values are written before its attention.
"""

import torch
from torch import Tensor

from kernels.attention_torch import paged_attention_torch
from kernels.dispatch import HAS_TRITON, Implementation, choose
from kernels.inputs.attention_options import AttentionOptions
from kernels.inputs.paged_batch import PagedBatch, attention_mask

if HAS_TRITON:
    from kernels.gpu.attention import paged_attention_triton

__all__ = ["PagedBatch", "attention_mask", "paged_attention", "paged_attention_reference"]


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    partition_keys: int | None = None,
    implementation: Implementation | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of `query [num_tokens, num_heads, head_dim]` over the cache.

    Query head h reads key head `h // (num_heads // num_kv_heads)`. A key's score is its product
    with the query times `scale`, then `softcap * tanh(score / softcap)`; a query sees the last
    `sliding_window` keys. `sinks [num_heads]` are scores of a key without a value. Caches of 8-bit
    numbers hold keys divided by `k_scale` and values divided by `v_scale`.

    Computes in float32; softmax weights may be rounded to bfloat16 if the queries are. Returns
    `out`, `[num_tokens, num_heads, v_head_dim]`, allocated in the query's dtype if absent. A query
    that sees no key gets zeros. Unseen keys and values have no effect, even if they are NaN.
    `partition_keys` sets the size of the partitions of long sequences' keys, which the
    implementation chooses otherwise.
    """
    if implementation is None:
        implementation = choose(query.device.type, (query.dtype, k_cache.dtype))
    if out is None:
        out = query.new_empty(*query.shape[:2], v_cache.shape[-1])
    options = AttentionOptions(
        scale, sliding_window, softcap, sinks, k_scale, v_scale, partition_keys
    )
    if implementation == Implementation.REFERENCE:
        return paged_attention_reference(query, k_cache, v_cache, batch, **vars(options), out=out)
    if implementation == Implementation.TORCH:
        return paged_attention_torch(query, k_cache, v_cache, batch, options, out)
    if implementation == Implementation.TRITON:
        return paged_attention_triton(query, k_cache, v_cache, batch, options, out)
    _paged_attention_cpp(query, k_cache, v_cache, batch, options, implementation.isa, out)
    return out


def _paged_attention_cpp(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    isa: int,
    out: Tensor,
) -> None:
    sinks = options.sinks
    torch.ops.quire.paged_attention(
        out,
        query,
        k_cache,
        v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        options.scale,
        options.sliding_window or 0,
        options.softcap or 0.0,
        None if sinks is None else sinks.float().contiguous(),
        options.k_scale,
        options.v_scale,
        options.partition_keys or 0,
        isa,
    )


def paged_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    partition_keys: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The reference of `paged_attention`: one sequence and one head at a time, its keys in one
    partition."""
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    if out is None:
        out = query.new_empty(*query.shape[:2], v_cache.shape[-1])
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start_loc[seq : seq + 2].tolist()
        num_blocks = -(-seq_len // batch.block_size)
        blocks = batch.block_table[seq, :num_blocks].long()
        keys = k_cache[blocks].flatten(0, 1)[:seq_len].float() * k_scale
        values = v_cache[blocks].flatten(0, 1)[:seq_len].float() * v_scale
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        seen = attention_mask(positions, seq_len, sliding_window)
        # NaN times a weight of 0 is NaN.
        values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = query[start:end, head].float() @ keys[:, kv_head].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            sink = torch.tensor(float("-inf")) if sinks is None else sinks[head].float()
            scores = torch.cat([scores, sink.expand(end - start, 1)], 1)
            weights = scores.softmax(-1)[:, :-1].masked_fill(~seen.any(1, keepdim=True), 0.0)
            out[start:end, head] = (weights @ values[:, kv_head]).to(out.dtype)
    return out

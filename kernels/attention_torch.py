"""Paged attention by torch operations, on any device: loads the keys and values of sequences with
equally long queries, and pads them for one product."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.inputs.attention_options import AttentionOptions
from kernels.inputs.paged_batch import PagedBatch, attention_mask

# The most keys of a group of sequences, which bounds the memory that padding takes.
_MAX_GROUP_KEYS = 1 << 16


@dataclass(frozen=True)
class QueryGroup:
    """Sequences of a batch with equally long queries, for one product."""

    token_indices: Tensor  # [num_seqs * query_len] of the flat batch
    slots: Tensor  # [num_seqs * num_keys] in the cache; padding is slot 0, of the null block
    unseen: Tensor  # indices into `slots` of those that no query sees
    seen: Tensor  # bool [num_seqs, query_len, num_keys]


def query_groups(batch: PagedBatch, sliding_window: int | None) -> Iterator[QueryGroup]:
    """Yield groups of equal query length, short sequences first."""
    seq_lens = batch.seq_lens.tolist()
    query_lens = batch.query_lens.tolist()
    members: list[int] = []
    for seq in sorted(range(len(seq_lens)), key=lambda s: (query_lens[s], seq_lens[s])):
        full = (len(members) + 1) * seq_lens[seq] > _MAX_GROUP_KEYS
        if members and (full or query_lens[seq] != query_lens[members[0]]):
            yield _group(batch, members, sliding_window)
            members = []
        if query_lens[seq]:
            members.append(seq)
    if members:
        yield _group(batch, members, sliding_window)


def _group(batch: PagedBatch, members: list[int], sliding_window: int | None) -> QueryGroup:
    device = batch.seq_lens.device
    index = torch.tensor(members, device=device)
    seq_lens = batch.seq_lens[index].unsqueeze(1)
    query_len = int(batch.query_lens[members[0]])
    offsets = torch.arange(query_len, device=device)
    keys = torch.arange(int(seq_lens.max()), device=device)
    blocks = batch.block_table[index][:, keys // batch.block_size].long()
    slots = blocks * batch.block_size + keys % batch.block_size
    positions = seq_lens - query_len + offsets
    seen = attention_mask(positions, len(keys), sliding_window)
    unseen = ~seen.any(1)
    return QueryGroup(
        token_indices=(batch.query_start_loc[index].unsqueeze(1) + offsets).flatten(),
        slots=slots.masked_fill(unseen, 0).flatten(),
        unseen=unseen.flatten().nonzero().squeeze(1),
        seen=seen,
    )


def paged_attention_torch(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    out: Tensor,
) -> Tensor:
    """As `kernels.attention.paged_attention`, without partitions."""
    for group in query_groups(batch, options.sliding_window):
        queries = query[group.token_indices].float() * (options.scale * options.k_scale)
        scores = _products(queries, _gather(k_cache, group), group.seen.shape)
        if options.softcap is not None:
            scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
        scores.masked_fill_(~group.seen[:, None, None], -torch.inf)
        weights = _softmax(scores, options.sinks)
        attended = _weighted_sums(weights, _gather(v_cache, group)).mul_(options.v_scale)
        out[group.token_indices] = attended.to(out.dtype)
    return out


def _gather(cache: Tensor, group: QueryGroup) -> Tensor:
    """The slots' entries as float32 `[num_seqs, num_kv_heads, num_keys, head_dim]`."""
    entries = cache.flatten(0, 1)[group.slots].float()
    # The null block may hold NaN, and NaN times a weight of 0 is NaN.
    entries.index_fill_(0, group.unseen, 0.0)
    num_seqs, _, num_keys = group.seen.shape
    return entries.view(num_seqs, num_keys, *cache.shape[2:]).transpose(1, 2)


def _products(queries: Tensor, keys: Tensor, seen_shape: torch.Size) -> Tensor:
    """The products of `queries [num_seqs * query_len, num_heads, head_dim]` and keys:
    `[num_seqs, num_kv_heads, group_size, query_len, num_keys]`.

    All heads of a group are rows of one matrix, so that keys are read once.
    """
    num_seqs, query_len, num_keys = seen_shape
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    group_size = queries.shape[1] // num_kv_heads
    grouped = queries.view(num_seqs, query_len, num_kv_heads, group_size, head_dim)
    rows = grouped.permute(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, head_dim)
    scores = torch.matmul(rows, keys.transpose(2, 3))
    return scores.view(num_seqs, num_kv_heads, group_size, query_len, num_keys)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension; zeros where no key is seen."""
    if sinks is None:
        lowest = torch.tensor(torch.finfo(torch.float32).min, device=scores.device)
        sink = lowest.expand(*scores.shape[:-1], 1)
    else:
        sink = sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def _weighted_sums(weights: Tensor, values: Tensor) -> Tensor:
    """`[num_seqs * query_len, num_heads, v_head_dim]`."""
    num_seqs, num_kv_heads, group_size, query_len, _ = weights.shape
    out = torch.matmul(weights.flatten(2, 3), values)
    out = out.view(num_seqs, num_kv_heads, group_size, query_len, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(num_seqs * query_len, num_kv_heads * group_size, -1)

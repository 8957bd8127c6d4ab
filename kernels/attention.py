"""Attention over a paged cache, for a ragged batch of queries.

The batch is flat: the tokens of all sequences one after the other, cut by `query_start_loc`. A
cache is `[num_blocks, block_size, num_kv_heads, head_dim]`; position p of a sequence lies in block
`block_table[p // block_size]` at offset `p % block_size`. Queries are the last tokens of their
sequences, and their keys and values are in the cache already.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Keys gathered at once for a group of sequences: bounds the memory that padding can take.
_MAX_GATHERED_KEYS = 1 << 16


def attention_mask(positions: Tensor, num_keys: int, sliding_window: int | None = None) -> Tensor:
    """Which of `num_keys` keys a query sees: bool `[*positions.shape, num_keys]`.

    A query at position p sees the keys 0..p, or the last `sliding_window` of them. With
    `positions = arange(n)` this is the one causal mask that serves a batch of whole prompts.
    """
    keys = torch.arange(num_keys, device=positions.device)
    queries = positions.unsqueeze(-1)
    visible = keys <= queries
    if sliding_window is not None:
        visible &= keys > queries - sliding_window
    return visible


@dataclass(frozen=True)
class QueryGroup:
    """Sequences of a batch whose queries are equally long, so that one product serves them."""

    token_indices: Tensor  # [num_seqs * query_len] of the flat batch
    positions: Tensor  # [num_seqs, query_len]
    slots: Tensor  # [num_seqs * num_keys] in the cache; the null block's slot 0 as padding
    padding: Tensor  # indices of the padding in `slots`

    def keys_seen(self, sliding_window: int | None) -> Tensor:
        """bool `[num_seqs, query_len, num_keys]`; padding is never seen."""
        num_keys = self.slots.numel() // self.positions.shape[0]
        return attention_mask(self.positions, num_keys, sliding_window)


@dataclass(frozen=True)
class PagedBatch:
    """Where the queries of one step stand, and where their keys lie; shared by all layers."""

    block_table: Tensor  # [num_seqs, max_blocks]
    query_start_loc: Tensor  # [num_seqs + 1]
    seq_lens: Tensor  # [num_seqs], queries included
    block_size: int

    @cached_property
    def query_lens(self) -> Tensor:
        return self.query_start_loc.diff()

    @cached_property
    def groups(self) -> tuple[QueryGroup, ...]:
        return tuple(self._group(members) for members in self._memberships())

    def _memberships(self) -> Iterator[Tensor]:
        """Equal query lengths together, short sequences first, until a group is full."""
        seq_lens = self.seq_lens.tolist()
        query_lens = self.query_lens.tolist()
        members: list[int] = []
        for seq in sorted(range(len(seq_lens)), key=lambda s: (query_lens[s], seq_lens[s])):
            full = (len(members) + 1) * seq_lens[seq] > _MAX_GATHERED_KEYS
            if members and (full or query_lens[seq] != query_lens[members[0]]):
                yield torch.tensor(members, device=self.seq_lens.device)
                members = []
            members.append(seq)
        if members:
            yield torch.tensor(members, device=self.seq_lens.device)

    def _group(self, members: Tensor) -> QueryGroup:
        seq_lens = self.seq_lens[members].unsqueeze(1)
        query_len = int(self.query_lens[members[0]])
        offsets = torch.arange(query_len, device=members.device)
        keys = torch.arange(int(seq_lens.max()), device=members.device)
        blocks = self.block_table[members][:, keys // self.block_size].long()
        slots = blocks * self.block_size + keys % self.block_size
        beyond = keys >= seq_lens
        return QueryGroup(
            token_indices=(self.query_start_loc[members].unsqueeze(1) + offsets).flatten(),
            positions=seq_lens - query_len + offsets,
            slots=slots.masked_fill(beyond, 0).flatten(),
            padding=beyond.flatten().nonzero().squeeze(1),
        )


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
) -> Tensor:
    """Causal attention of `query [num_tokens, num_heads, head_dim]` over the cache.

    Heads are grouped: query head h reads key head `h // (num_heads // num_kv_heads)`. `softcap`
    bounds the scores by `softcap * tanh(score / softcap)`; `sinks [num_heads]` are scores of a key
    that takes weight and gives nothing. Computes in float32. Returns
    `[num_tokens, num_heads, v_head_dim]` in the query's dtype. Sequences with equally long queries
    are padded to one product; slots that are not theirs, NaN included, have no effect.
    """
    out = query.new_empty(*query.shape[:2], v_cache.shape[-1])
    for group in batch.groups:
        seen = group.keys_seen(sliding_window)
        out[group.token_indices] = _attend(
            query[group.token_indices].view(*seen.shape[:2], *query.shape[1:]).float(),
            _gather(k_cache, group, seen.shape),
            _gather(v_cache, group, seen.shape),
            seen,
            scale,
            softcap,
            sinks,
        ).to(query.dtype)
    return out


def _gather(cache: Tensor, group: QueryGroup, seen_shape: torch.Size) -> Tensor:
    """The slots' entries as float32 `[num_seqs, num_kv_heads, num_keys, head_dim]`."""
    num_seqs, _, num_keys = seen_shape
    entries = cache.flatten(0, 1).index_select(0, group.slots)
    # The null block may hold NaN, which a weight of zero does not silence.
    entries.index_fill_(0, group.padding, 0.0)
    return entries.view(num_seqs, num_keys, *cache.shape[2:]).transpose(1, 2).float()


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`query [num_seqs, query_len, num_heads, head_dim]` to `[num_seqs * query_len, num_heads, …]`.

    All heads of a group stand as rows of one matrix, so that keys are read once.
    """
    num_seqs, query_len, num_heads, head_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    group_size = num_heads // num_kv_heads
    grouped = query.view(num_seqs, query_len, num_kv_heads, group_size, head_dim)
    folded = grouped.permute(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, head_dim)
    scores = torch.matmul(folded, keys.transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(num_seqs, num_kv_heads, group_size, query_len, num_keys)
    scores = scores.masked_fill_(~seen[:, None, None], float("-inf"))
    weights = _softmax(scores, sinks).reshape(num_seqs, num_kv_heads, -1, num_keys)
    out = torch.matmul(weights, values)
    out = out.view(num_seqs, num_kv_heads, group_size, query_len, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(num_seqs * query_len, num_heads, -1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of `[num_seqs, num_kv_heads, group, query_len, num_keys]`."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


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
) -> Tensor:
    """The obvious twin of `paged_attention`: one sequence and one head at a time."""
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    out = query.new_empty(*query.shape[:2], v_cache.shape[-1])
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start_loc[seq : seq + 2].tolist()
        num_blocks = -(-seq_len // batch.block_size)
        blocks = batch.block_table[seq, :num_blocks].long()
        keys = k_cache[blocks].flatten(0, 1)[:seq_len].float()
        values = v_cache[blocks].flatten(0, 1)[:seq_len].float()
        positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        seen = attention_mask(positions, seq_len, sliding_window)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = query[start:end, head].float() @ keys[:, kv_head].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~seen, float("-inf")).exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks[head].float().exp()
            out[start:end, head] = (weights / total @ values[:, kv_head]).to(query.dtype)
    return out

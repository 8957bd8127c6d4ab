"""Log-probabilities and ranks in Triton, in two launches: tiles of a row in parallel, then rows.

Tokens are ranked by distinct keys: the larger logit has the larger key, and of equal logits the
lower token id. The most likely tokens of a row are among those of its tiles, and are selected one
after another, the largest key first.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# The most likely tokens at most; each costs a pass over all keys.
MAX_TOP: Final = 32
_TILE: Final = 4096
_NO_KEY: Final = tl.constexpr(-(2**63))

Entries = tuple[Tensor, Tensor, Tensor]


def token_logprobs_triton(logits: Tensor, token_ids: Tensor, num_top: int) -> Entries:
    """`kernels.sampling.token_logprobs` in Triton: token ids, log-probabilities and ranks.
    `num_top` is at most MAX_TOP and the vocabulary's size; logits of 16 bits are converted to
    float32."""
    num_rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, _TILE)
    ids = token_ids.new_empty(num_rows, 1 + num_top)
    ranks = torch.empty_like(ids)
    logprobs = torch.empty_like(ids, dtype=torch.float32)
    if not num_rows:
        return ids, logprobs, ranks
    largest, sums = (logprobs.new_empty(num_rows, tiles) for _ in range(2))
    before = torch.empty_like(largest, dtype=torch.int32)
    keys = token_ids.new_empty(num_rows, tiles * num_top)
    row = (logits, logits.stride(0), vocab_size, token_ids, num_top)
    found = (largest, sums, before, keys)
    _tiles_kernel[(num_rows, tiles)](*row, *found, TILE=_TILE, num_warps=8)
    _row_kernel[(num_rows,)](
        *row,
        *found,
        ids,
        logprobs,
        ranks,
        tiles,
        TILES=triton.next_power_of_2(tiles),
        # Independent of `num_top`, so that no other value causes a compilation.
        KEYS=triton.next_power_of_2(tiles * MAX_TOP),
    )
    return ids, logprobs, ranks


@triton.jit
def _key(logit, token_id):  # type: ignore[no-untyped-def]
    """An int64 key that is larger for a more likely token."""
    # -0.0 becomes 0.0. Read as integers, negative floats are in reverse order.
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def _of_key(key):  # type: ignore[no-untyped-def]
    """The logit and the token id of a key."""
    rising = (key >> 32).to(tl.int32)
    bits = tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _chosen(logits, row_stride, vocab_size, token_ids, row):  # type: ignore[no-untyped-def]
    """The chosen token and its logit, NaN if the token does not exist."""
    token_id = tl.load(token_ids + row)
    exists = (token_id >= 0) & (token_id < vocab_size)
    logit = tl.load(logits + row * row_stride + token_id, mask=exists, other=float("nan"))
    return token_id, logit.to(tl.float32)


@triton.jit(do_not_specialize=["num_top"])
def _tiles_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab_size,
    token_ids,
    num_top,
    largest,
    sums,
    before,
    keys,
    TILE: tl.constexpr,
):
    """Store a tile's largest logit, the sum of exponentials relative to it, the number of tokens
    ranked before the chosen one, and the keys of the most likely tokens."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    place = row * tl.num_programs(1) + tile
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
    values = values.to(tl.float32)
    peak = tl.max(values, axis=0)
    shift = tl.where(peak > float("-inf"), peak, 0.0)
    tl.store(largest + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(values - shift), axis=0))
    left = tl.where(inside, _key(values, ids), _NO_KEY)
    chosen_id, chosen_logit = _chosen(logits, row_stride, vocab_size, token_ids, row)
    is_before = left > _key(chosen_logit, chosen_id)
    tl.store(before + place, tl.sum(is_before.to(tl.int32), axis=0))
    for number in range(num_top):
        best = tl.max(left, axis=0)
        tl.store(keys + place * num_top + number, best)
        left = tl.where(left == best, _NO_KEY, left)


@triton.jit(do_not_specialize=["num_top", "tiles"])
def _row_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab_size,
    token_ids,
    num_top,
    largest,
    sums,
    before,
    keys,
    out_ids,
    out_logprobs,
    out_ranks,
    tiles,
    TILES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Merge a row's tiles."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    places = row * tiles + tile
    peaks = tl.load(largest + places, mask=tile < tiles, other=float("-inf"))
    masses = tl.load(sums + places, mask=tile < tiles, other=0.0)
    counts = tl.load(before + places, mask=tile < tiles, other=0)
    peak = tl.max(peaks, axis=0)
    log_sum = tl.log(tl.sum(tl.exp(peaks - peak) * masses, axis=0))
    chosen_id, chosen_logit = _chosen(logits, row_stride, vocab_size, token_ids, row)
    place = row * (1 + num_top)
    tl.store(out_ids + place, chosen_id)
    tl.store(out_logprobs + place, (chosen_logit - peak) - log_sum)
    tl.store(out_ranks + place, tl.sum(counts, axis=0).to(tl.int64) + 1)
    candidate = tl.arange(0, KEYS)
    num_keys = tiles * num_top
    left = tl.load(keys + row * num_keys + candidate, mask=candidate < num_keys, other=-(2**63))
    for number in range(num_top):
        best = tl.max(left, axis=0)
        logit, token_id = _of_key(best)
        tl.store(out_ids + place + 1 + number, token_id)
        tl.store(out_logprobs + place + 1 + number, (logit - peak) - log_sum)
        tl.store(out_ranks + place + 1 + number, number + 1)
        left = tl.where(left == best, _NO_KEY, left)

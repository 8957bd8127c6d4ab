"""Sampling as a function of (logits, seed, position): nothing depends on the batch or the row.

A token is drawn by the Gumbel-max method: the largest of `logit / temperature + noise`, where the
noise of token v at position p is word `v % 4` of Philox4x32-10 under the seed's 64 bits as the key
and (v // 4, p, 0, 0) as the counter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.philox import philox4x32

_WORD = 0xFFFFFFFF
# The largest float32 below 1.
_BELOW_ONE = 1.0 - 2.0**-24


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 `[num_rows, vocab_size]`.

    `seeds` and `positions` are int64 `[num_rows]`; a seed counts by its 64 bits.
    """
    counters = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    position = positions.unsqueeze(1)
    zero = torch.zeros_like(position)
    key = ((seeds & _WORD).unsqueeze(1), (seeds >> 32 & _WORD).unsqueeze(1))
    words = torch.stack(philox4x32((counters, position, zero, zero), key), dim=-1)
    # v is the chance of a larger noise: small v, which decides draws, keeps all its 32 bits.
    v = words.flatten(1)[:, :vocab_size].float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()


def keep_most_likely(logits: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """The logits with -inf where neither `top_k` nor `top_p` considers a token.

    `top_k` 0 and `top_p` 1 consider all. `top_p` is taken of what `top_k` leaves: the fewest
    tokens whose probability reaches it. Tokens as likely as the last one considered stay too.
    """
    kept = logits.clone()
    filtering = (top_ks > 0) | (top_ps < 1)
    # Each width by itself, so that rounding in a row does not depend on the other rows.
    for top_k in sorted(set(top_ks[filtering].tolist())):
        rows = (filtering & (top_ks == top_k)).nonzero().squeeze(1)
        floor = _least_considered(logits[rows], top_k, top_ps[rows])
        kept[rows] = kept[rows].masked_fill(logits[rows] < floor, float("-inf"))
    return kept


def _least_considered(logits: Tensor, top_k: int, top_ps: Tensor) -> Tensor:
    """The smallest logit that stays, per row: `[num_rows, 1]`."""
    vocab_size = logits.shape[1]
    if 0 < top_k < vocab_size:
        ordered = logits.topk(top_k).values
    else:
        ordered = logits.sort(descending=True).values
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    # The first token always stays; with top_p 1 rounding must not drop the last ones.
    stays = (mass_before < top_ps.unsqueeze(1)) | (top_ps >= 1).unsqueeze(1)
    num_staying = stays.sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, num_staying - 1)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token id per row of `logits [num_rows, vocab_size]`, float32; int64 `[num_rows]`.

    Temperature 0 takes the most likely token. `positions` are those that the sampled tokens get.
    """
    token_ids = logits.argmax(-1)
    drawing = (temperatures > 0).nonzero().squeeze(1)
    if drawing.numel() == 0:
        return token_ids
    chosen = logits[drawing]
    # From the largest down, so that a tiny temperature gives -inf and never inf.
    chosen = (chosen - chosen.amax(-1, keepdim=True)) / temperatures[drawing].unsqueeze(1)
    chosen = keep_most_likely(chosen, top_ks[drawing], top_ps[drawing])
    chosen += gumbel_noise(seeds[drawing], positions[drawing], logits.shape[1])
    token_ids[drawing] = chosen.argmax(-1)
    return token_ids


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities per row: the chosen token's first, then the most likely ones."""

    token_ids: Tensor  # int64 [num_rows, 1 + num_top]
    logprobs: Tensor  # float32 [num_rows, 1 + num_top]
    ranks: Tensor  # int64 [num_rows, 1 + num_top]; 1 is the most likely


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution, before temperature and filters: float32 logits.

    Ranked by logit; of equal ones the lower token id comes first.
    """
    keys = _ranking_keys(logits)
    chosen = token_ids.unsqueeze(1)
    top_ids = keys.topk(num_top).indices
    token_ids = torch.cat([chosen, top_ids], -1)
    top_ranks = torch.arange(1, num_top + 1, device=logits.device).expand_as(top_ids)
    chosen_ranks = (keys > keys.gather(1, chosen)).sum(-1, keepdim=True) + 1
    return TokenLogprobs(
        token_ids=token_ids,
        logprobs=logits.log_softmax(-1).gather(1, token_ids),
        ranks=torch.cat([chosen_ranks, top_ranks], -1),
    )


def _ranking_keys(logits: Tensor) -> Tensor:
    """int64, all different within a row: the larger logit has the larger key, and of equal logits
    the one with the lower token id."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    # The bits of a float rise with it if it is positive, and fall if it is negative.
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (rising.long() << 32) - torch.arange(logits.shape[1], device=logits.device)

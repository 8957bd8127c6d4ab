"""Sampling as a function of logits, seed and position, independent of the batch and the row.

A token is drawn by the Gumbel-max method: the largest of `logit / temperature + noise`, where the
noise of token v at position p is word `v % 4` of Philox4x32-10 under the seed's 64 bits as the key
and (v // 4, p, 0, 0) as the counter.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, Implementation, choose
from kernels.inputs.sampling_tensors import SamplingTensors as SamplingTensors
from kernels.philox import random_words

if HAS_TRITON:
    from kernels.gpu.logprobs import MAX_TOP, token_logprobs_triton
    from kernels.gpu.sampling import sample_triton

NO_TOKEN: Final = -1  # the token of a row whose logits allow none
# The largest float32 below 1.
_BELOW_ONE: Final = 1.0 - 2.0**-24


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities per row: the chosen token's first, then the most likely ones."""

    token_ids: Tensor  # int64 [num_rows, 1 + num_top]
    logprobs: Tensor  # float32 [num_rows, 1 + num_top]
    ranks: Tensor  # int64 [num_rows, 1 + num_top]; 1 is the most likely


def sample(
    logits: Tensor, params: SamplingTensors, *, implementation: Implementation | None = None
) -> Tensor:
    """One token id per row of `logits [num_rows, vocab_size]`, float32; int64 `[num_rows]`.

    NO_TOKEN if a logit is NaN or +inf, or all are -inf. Draws from the tokens that top_k, top_p and
    min_p all keep, and those as likely as the last one kept. `top_p` applies to the tokens that
    `top_k` keeps, and keeps the fewest whose probability reaches it. `min_p` keeps tokens at least
    so many times as likely as the most likely token.
    """
    if implementation is None:
        implementation = choose(logits.device.type, (logits.dtype,))
    if implementation == Implementation.TRITON:
        return sample_triton(logits, params)
    if not implementation.is_cpp:
        return sample_reference(logits, params)
    token_ids: Tensor = torch.ops.quire.sample(
        logits,
        params.temperatures,
        params.top_ks,
        params.top_ps,
        params.min_ps,
        params.seeds,
        params.positions,
        implementation.isa,
    )
    return token_ids


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_top: int,
    *,
    implementation: Implementation | None = None,
) -> TokenLogprobs:
    """Log-probabilities of the model's distribution, before temperature and filters: float32
    logits.

    Tokens are ranked by logit, equal ones by token id.
    """
    if implementation is None:
        implementation = choose(logits.device.type, (logits.dtype,))
    if implementation == Implementation.TRITON and num_top <= min(MAX_TOP, logits.shape[1]):
        return TokenLogprobs(*token_logprobs_triton(logits, token_ids, num_top))
    if not implementation.is_cpp:
        return token_logprobs_reference(logits, token_ids, num_top)
    return TokenLogprobs(
        *torch.ops.quire.token_logprobs(logits, token_ids, num_top, implementation.isa)
    )


def sample_reference(logits: Tensor, params: SamplingTensors) -> Tensor:
    """The reference of `sample`, on any device: noise for every token of every row."""
    possible = (logits < float("inf")).all(-1) & (logits > float("-inf")).any(-1)
    token_ids = logits.argmax(-1).masked_fill_(~possible, NO_TOKEN)
    drawing = (possible & (params.temperatures > 0)).nonzero().squeeze(1)
    if drawing.numel() == 0:
        return token_ids
    chosen, drawn = logits[drawing], params.of(drawing)
    # Relative to the largest, so that a tiny temperature gives -inf and never inf.
    scaled = (chosen - chosen.amax(-1, keepdim=True)) / drawn.temperatures.unsqueeze(1)
    scores = keep_most_likely(scaled, drawn)
    scores += gumbel_noise(drawn.seeds, drawn.positions, logits.shape[1])
    token_ids[drawing] = scores.argmax(-1)
    return token_ids


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 `[num_rows, vocab_size]`."""
    words = random_words(seeds, positions, vocab_size)
    # v is the probability of larger noise: small v, which decides draws, keeps all its 32 bits.
    v = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return v.neg_().log1p_().neg_().log_().neg_()


def keep_most_likely(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """The scaled logits, the largest of which is 0, with -inf where a token is dropped."""
    floors = params.min_ps.log().unsqueeze(1)
    filtering = (params.top_ks > 0) | (params.top_ps < 1)
    # Each top_k separately, so that rounding in a row does not depend on other rows.
    for top_k in sorted(set(params.top_ks[filtering].tolist())):
        rows = (filtering & (params.top_ks == top_k)).nonzero().squeeze(1)
        floor = _filter_floor(scaled[rows], top_k, params.top_ps[rows])
        floors[rows] = torch.maximum(floors[rows], floor)
    return scaled.masked_fill(scaled < floors, float("-inf"))


def _filter_floor(scaled: Tensor, top_k: int, top_ps: Tensor) -> Tensor:
    """The floor: the smallest value that `top_k` and `top_ps` keep, per row: `[num_rows, 1]`."""
    vocab_size = scaled.shape[1]
    if 0 < top_k < vocab_size:
        ordered = scaled.topk(top_k).values
    else:
        ordered = scaled.sort(descending=True).values
    probabilities = ordered.double().softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    # The first token is always kept; with top_p 1 rounding must not drop the last ones.
    kept = (mass_before < top_ps.unsqueeze(1)) | (top_ps >= 1).unsqueeze(1)
    num_kept = kept.sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, num_kept - 1)


def token_logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """The reference of `token_logprobs`, on any device."""
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
    # Read as integers, negative floats are in reverse order.
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (rising.long() << 32) - torch.arange(logits.shape[1], device=logits.device)

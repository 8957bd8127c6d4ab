"""Locally typical sampling: tokens whose information content is far from the expected one become
impossible (Meister et al., "Locally Typical Sampling", 2023)."""

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, Implementation, choose

if HAS_TRITON:
    from kernels.gpu.typical_p import apply_typical_p_triton


def apply_typical_p(
    logits: Tensor,
    lines: Tensor,
    temperatures: Tensor,
    typical_ps: Tensor,
    *,
    implementation: Implementation | None = None,
) -> None:
    """Keep the tokens whose information content is closest to the entropy, as many as reach the
    probability `typical_p`, and those as close as the last one; set other logits to -inf, in place.

    `logits` is float32 `[num_lines, vocab_size]`; `lines` int64, distinct. `temperatures`, above 0,
    and `typical_ps`, below 1, are float32 of the same length. The distribution is that of
    `logits / temperature`. A line that has NaN, +inf or nothing above -inf is left as it is.
    """
    if implementation is None:
        implementation = choose(logits.device.type, (logits.dtype,))
    if implementation.is_cpp:
        torch.ops.quire.apply_typical_p(logits, lines, temperatures, typical_ps, implementation.isa)
    elif implementation == Implementation.TRITON:
        apply_typical_p_triton(logits, lines, temperatures, typical_ps)
    else:
        apply_typical_p_reference(logits, lines, temperatures, typical_ps)


def apply_typical_p_reference(
    logits: Tensor, lines: Tensor, temperatures: Tensor, typical_ps: Tensor
) -> None:
    """The reference of `apply_typical_p`, on any device."""
    # One after another: rounding in a line must not depend on their number.
    for index in range(len(lines)):
        here = slice(index, index + 1)
        line = logits.index_select(0, lines[here])
        distances, masses = _distances(line, temperatures[here])
        ordered, order = distances.sort(stable=True)
        passed = masses.gather(1, order).cumsum(-1) < typical_ps[here].double().unsqueeze(1)
        last = passed.sum(-1, keepdim=True).clamp_max(line.shape[1] - 1)
        # Comparisons with NaN are false, so that a line without a distribution keeps its logits.
        dropped = distances > ordered.gather(1, last)
        logits.index_copy_(0, lines[here], line.masked_fill_(dropped, float("-inf")))


def _distances(line: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token, how far its information content is from the entropy, and its probability."""
    peak = line.amax(-1, keepdim=True)
    scaled = ((line - peak) / temperature.unsqueeze(1)).double()
    logprobs = scaled.log_softmax(-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, logprobs * probabilities, 0.0).sum(-1, keepdim=True)
    return (-logprobs - entropy).abs(), probabilities

"""Locally typical sampling in Triton: a program per line, without sorting it."""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 1024  # logits that a program processes at a time
_PIVOTS: Final = 4  # distances that it tries in one pass


def apply_typical_p_triton(
    logits: Tensor, lines: Tensor, temperatures: Tensor, typical_ps: Tensor
) -> None:
    """`kernels.typical_p.apply_typical_p` in Triton, without checks of lines, which are on the
    device."""
    if len(lines):
        _typical_p_kernel[(len(lines),)](
            logits,
            logits.stride(0),
            logits.shape[1],
            lines,
            temperatures,
            typical_ps,
            BLOCK=_BLOCK,
            PIVOTS=_PIVOTS,
            num_warps=8,
        )


@triton.jit
def _typical_p_kernel(  # type: ignore[no-untyped-def]
    logits,
    line_stride,
    vocab_size,
    lines,
    temperatures,
    typical_ps,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    index = tl.program_id(0)
    line = logits + tl.load(lines + index) * line_stride
    temperature = tl.load(temperatures + index)
    peak, has_distribution = _peak(line, vocab_size, BLOCK)
    if has_distribution:
        total, expected, least = _moments(line, vocab_size, peak, temperature, BLOCK)
        farthest = _distance_of_mass(
            line,
            vocab_size,
            peak,
            temperature,
            expected,
            tl.maximum(tl.abs(expected), tl.abs(least.to(tl.float64) - expected)),
            tl.load(typical_ps + index).to(tl.float64) * total,
            BLOCK,
            PIVOTS,
        )
        for first in range(0, vocab_size, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            scaled = _scaled(line, tokens, vocab_size, peak, temperature)
            is_far = tl.abs(scaled.to(tl.float64) - expected) > farthest
            tl.store(line + tokens, float("-inf"), mask=(tokens < vocab_size) & is_far)


@triton.jit
def _peak(line, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit, and whether there are no NaN and +inf and anything above -inf."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    num_wrong = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        values = tl.load(line + tokens, mask=tokens < vocab_size, other=float("-inf"))
        # A comparison with NaN is false.
        is_right = values < float("inf")
        num_wrong += tl.where(is_right, 0, 1)
        largest = tl.maximum(largest, tl.where(is_right, values, float("-inf")))
    peak = tl.max(largest, axis=0)
    return peak, (tl.sum(num_wrong, axis=0) == 0) & (peak > float("-inf"))


@triton.jit
def _scaled(line, tokens, vocab_size, peak, temperature):  # type: ignore[no-untyped-def]
    """Logits relative to the largest one, divided by the temperature."""
    values = tl.load(line + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return tl.div_rn(values - peak, temperature)


@triton.jit
def _masses(line, tokens, vocab_size, peak, temperature):  # type: ignore[no-untyped-def]
    """Whether tokens are possible, their scaled logits or 0, and their masses: probabilities
    relative to that of the largest logit."""
    scaled = _scaled(line, tokens, vocab_size, peak, temperature)
    is_possible = scaled > float("-inf")
    finite = tl.where(is_possible, scaled, 0.0)
    return is_possible, finite, tl.where(is_possible, tl.exp(finite), 0.0).to(tl.float64)


@triton.jit
def _moments(line, vocab_size, peak, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all masses, the expected scaled logit, and the least finite one."""
    totals = tl.zeros([BLOCK], tl.float64)
    weighted = tl.zeros([BLOCK], tl.float64)
    least = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        _, finite, mass = _masses(line, tokens, vocab_size, peak, temperature)
        totals += mass
        weighted += finite.to(tl.float64) * mass
        least = tl.minimum(least, finite)
    total = tl.sum(totals, axis=0)
    return total, tl.sum(weighted, axis=0) / total, tl.min(least, axis=0)


@triton.jit
def _distance_of_mass(  # type: ignore[no-untyped-def]
    line,
    vocab_size,
    peak,
    temperature,
    expected,
    largest,
    target,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The smallest distance from the expected scaled logit within which the masses add up to
    `target`, which those within `largest` do. The sum within a bound is the same in every pass, and
    no smaller within a larger one."""
    below = tl.full([], -1.0, tl.float64)
    low = tl.full([], 0.0, tl.float64)
    high = largest
    shares = tl.arange(0, PIVOTS).to(tl.float64) / PIVOTS
    # [0, below] too little mass  (below, high] has the distance
    while low < high:
        pivots = low * (1.0 - shares) + high * shares
        within = tl.zeros([PIVOTS, BLOCK], tl.float64)
        lowest = tl.full([BLOCK], float("inf"), tl.float64)
        highest = tl.full([BLOCK], 0.0, tl.float64)
        for first in range(0, vocab_size, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            is_possible, finite, mass = _masses(line, tokens, vocab_size, peak, temperature)
            distance = tl.abs(finite.to(tl.float64) - expected)
            is_inside = distance[None, :] <= pivots[:, None]
            within += tl.where(is_inside, mass[None, :], 0.0)
            lowest = tl.minimum(
                lowest, tl.where(is_possible & (distance > below), distance, float("inf"))
            )
            highest = tl.maximum(highest, tl.where(is_possible & (distance <= high), distance, 0.0))
        sums = tl.sum(within, axis=1)
        too_little = tl.where(sums < target, pivots, -1.0)
        enough = tl.where(sums < target, float("inf"), pivots)
        below = tl.maximum(below, tl.max(too_little, axis=0))
        high = tl.minimum(tl.max(highest, axis=0), tl.min(enough, axis=0))
        low = tl.maximum(below, tl.min(lowest, axis=0))
    return high

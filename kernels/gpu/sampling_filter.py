"""Sampling kernels that apply top_k and top_p to the Gumbel argmax of a row."""

import triton
import triton.language as tl

from kernels.gpu.gumbel_argmax import best_of_splits, is_sampled, largest_of_splits, min_p_floor


@triton.jit(do_not_specialize=["splits"])
def collect_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab_size,
    splits,
    temperatures,
    top_ks,
    top_ps,
    peaks,
    candidates,
    counts,
    masses,
    candidate_masses,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    CANDIDATE_RANGE: tl.constexpr,
):
    """Store a tile's mass, and the number and mass of its candidates, which are its logits near the
    row's largest one; the first CAPACITY of them go into `candidates`, followed by -inf."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak = largest_of_splits(peaks, row, splits)
    _, has_k, _, has_p = _filters(top_ks, top_ps, vocab_size, row)
    if is_sampled(peak, temperature) & (has_k | has_p):
        place = row * tl.num_programs(1) + tl.program_id(1)
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = ids < vocab_size
        raw = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
        values = raw.to(tl.float32)
        mass = _mass(values, peak, temperature)
        is_candidate = values >= peak - CANDIDATE_RANGE * temperature
        number = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        count = tl.max(number, axis=0) + 1
        tl.store(counts + place, count)
        tl.store(masses + place, tl.sum(mass, axis=0))
        tl.store(candidate_masses + place, tl.sum(tl.where(is_candidate, mass, 0.0), axis=0))
        found = candidates + place * CAPACITY
        tl.store(found + number, raw, mask=is_candidate & (number < CAPACITY))
        rest = tl.arange(0, CAPACITY)
        tl.store(found + rest, float("-inf"), mask=rest >= count)


@triton.jit(do_not_specialize=["splits", "tiles"])
def filter_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab_size,
    splits,
    tiles,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    peaks,
    scores,
    argmax_ids,
    candidates,
    counts,
    masses,
    candidate_masses,
    floors,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Store a row's floor, the smallest scaled logit that its filters keep, or +inf if they keep
    its argmax."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak = largest_of_splits(peaks, row, splits)
    top_k, has_k, top_p, has_p = _filters(top_ks, top_ps, vocab_size, row)
    floor = float("inf")
    if is_sampled(peak, temperature) & (has_k | has_p):
        tile = tl.arange(0, TILES)
        places = row * tiles + tile
        count = tl.load(counts + places, mask=tile < tiles, other=0)
        mass = tl.load(masses + places, mask=tile < tiles, other=0.0)
        candidate_mass = tl.load(candidate_masses + places, mask=tile < tiles, other=0.0)
        total = tl.sum(mass, axis=0)
        has_floor = tl.where(
            has_k, tl.sum(count, axis=0) >= top_k, tl.sum(candidate_mass, axis=0) >= top_p * total
        )
        # A source that has the floor, and all logits above it.
        source = logits + row * row_stride
        size = vocab_size
        if has_floor & (tl.max(count, axis=0) <= CAPACITY):
            source = candidates + row * tiles * CAPACITY
            size = tiles * CAPACITY
        _, argmax_id = best_of_splits(scores, argmax_ids, row, splits)
        argmax_logit = tl.load(logits + row * row_stride + argmax_id).to(tl.float32)
        floor_logit = peak - float("inf")
        if has_k:
            wanted = top_k.to(tl.float32)
            floor_logit = _floor_logit(
                source, size, peak, temperature, wanted, argmax_logit, False, has_p, BLOCK, PIVOTS
            )
        if has_p:
            if has_k:
                total = _mass_of_top_k(source, size, peak, temperature, floor_logit, top_k, BLOCK)
            # The most likely token, with a mass of 1, is always kept.
            wanted = tl.maximum(top_p * total, 0.5)
            floor_logit_of_p = _floor_logit(
                source, size, peak, temperature, wanted, argmax_logit, True, False, BLOCK, PIVOTS
            )
            floor_logit = tl.maximum(floor_logit, floor_logit_of_p)
        if floor_logit > argmax_logit:
            least = min_p_floor(tl.load(min_ps + row))
            floor = tl.maximum(tl.div_rn(floor_logit - peak, temperature), least)
    tl.store(floors + row, floor)


@triton.jit
def _floor_logit(  # type: ignore[no-untyped-def]
    row_logits,
    vocab_size,
    peak,
    temperature,
    target,
    argmax_logit,
    is_mass,
    is_exact,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """The floor: the smallest logit with less than `target` above it, in tokens or in mass.

    If the argmax is kept and `is_exact` is false, the result may be any bound from the floor to the
    argmax's logit. The sum above a bound is the same in every pass, and no larger above a higher
    one.
    """
    below = peak - float("inf")
    low = below
    high = peak
    # The first lower bound is a guess; any is correct.
    start = tl.where(is_exact, tl.minimum(argmax_logit, peak - 8.0 * temperature), argmax_logit)
    shares = tl.arange(0, PIVOTS).to(tl.float32) / PIVOTS
    # (-inf, below] dropped  (below, high] has the floor  (high, peak] kept
    while (low < high) & (is_exact | (high > argmax_logit)):
        # Not from the difference, which may overflow.
        pivots = start * (1.0 - shares) + high * shares
        above = tl.zeros([PIVOTS, BLOCK], tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            values = tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf"))
            values = values.to(tl.float32)
            weights = tl.where(is_mass, _mass(values, peak, temperature), 1.0)
            above += tl.where(values[None, :] > pivots[:, None], weights[None, :], 0.0)
            lowest = tl.minimum(lowest, tl.where(values > below, values, float("inf")))
            highest = tl.maximum(highest, tl.where(values <= high, values, float("-inf")))
        sums = tl.sum(above, axis=1)
        too_much = tl.where(sums >= target, pivots, float("-inf"))
        enough = tl.where(sums >= target, float("inf"), pivots)
        below = tl.maximum(below, tl.max(too_much, axis=0))
        high = tl.minimum(tl.max(highest, axis=0), tl.min(enough, axis=0))
        low = tl.maximum(below, tl.min(lowest, axis=0))
        start = low
    return high


@triton.jit
def _mass_of_top_k(  # type: ignore[no-untyped-def]
    row_logits, vocab_size, peak, temperature, floor_logit, top_k, BLOCK: tl.constexpr
):
    """The mass of the `top_k` largest logits, of which `floor_logit` is the smallest."""
    counts = tl.zeros([BLOCK], tl.int32)
    equals = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf"))
        values = values.to(tl.float32)
        is_above = values > floor_logit
        counts += is_above.to(tl.int32)
        equals += (values == floor_logit).to(tl.int32)
        sums += tl.where(is_above, _mass(values, peak, temperature), 0.0)
    above, mass_above = tl.sum(counts, axis=0), tl.sum(sums, axis=0)
    # Tokens with the floor's logit count as far as top_k has room for them.
    missing = tl.minimum(top_k - above, tl.sum(equals, axis=0)).to(tl.float32)
    return mass_above + missing * _mass(floor_logit, peak, temperature)


@triton.jit
def _filters(top_ks, top_ps, vocab_size, row):  # type: ignore[no-untyped-def]
    """top_k and top_p, each with whether it may drop a token."""
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    return top_k, (top_k > 0) & (top_k < vocab_size), top_p, top_p < 1


@triton.jit
def _mass(values, peak, temperature):  # type: ignore[no-untyped-def]
    """Masses: probabilities relative to that of the largest logit."""
    return tl.exp((values - peak) * (1.0 / tl.maximum(temperature, 1e-37)))

"""Sampling in Triton: no row is sorted, and nothing is asked of the host.

Six launches, of which most cut each row into parts:

1. peaks: the largest logit of every split
2. draws: the best sum of scaled logit and noise, whatever top_k and top_p say
3. collects the logits near the row's largest one, where there is something to filter
4. judges: does the row's winner belong to what top_k and top_p consider? If so it is the token, for
   the best of all is the best of some. If not, the smallest logit that they consider is found:
   among the collected ones, or in the whole row where those are too many or too few.
5. draws again, for the rows whose winner was refused
6. picks: the winner of a row's splits

What splits hand over are maxima, which come out the same in any order; what adds up is cut and
added in an order that only the size of the vocabulary decides. So a row's token depends neither on
its neighbours nor on the number of splits.
"""

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.philox import random_words

if TYPE_CHECKING:
    from kernels.sampling import RowParams

_BLOCK: Final = 1024  # logits that a program has at a time
_JUDGED: Final = 2048  # the same of the judge, which has a row for itself
_PIVOTS: Final = 8  # bounds that it tries in one pass
# Of a row, and how many a kernel reads at once: one that is compiled serves any number of rows.
_MAX_SPLITS: Final = tl.constexpr(64)
# About four for each multiprocessor of a large GPU.
_WANTED_PROGRAMS: Final = 512
_TILE: Final = 4096  # logits from which a program collects
# How many it may collect, and how far below the largest one: e^-10 times as likely.
_CAPACITY: Final = 128
_NEAR: Final = 10.0


def num_splits(num_rows: int, vocab_size: int) -> int:
    """Splits of every row: many if there are few rows, none of them empty."""
    blocks = triton.cdiv(vocab_size, _BLOCK)
    wanted = min(_MAX_SPLITS.value, blocks, triton.cdiv(_WANTED_PROGRAMS, max(1, num_rows)))
    return int(triton.cdiv(blocks, triton.cdiv(blocks, wanted)))


def sample_triton(logits: Tensor, params: "RowParams") -> Tensor:
    """The Triton form of `sample`; logits may have 16 bits, and count as float32.

    Nothing waits for the device, so it can be captured into a graph.
    """
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token_ids
    splits = num_splits(num_rows, vocab_size)
    split_size = triton.cdiv(triton.cdiv(vocab_size, _BLOCK), splits) * _BLOCK
    peaks, scores = (logits.new_empty(num_rows, splits, dtype=torch.float32) for _ in range(2))
    peak_ids, drawn_ids = (torch.empty_like(peaks, dtype=torch.int32) for _ in range(2))
    floors = torch.empty_like(params.temperatures)
    row = (logits, logits.stride(0), vocab_size)
    noise = (params.temperatures, params.min_ps, params.seeds, params.positions)
    draw = (*row, split_size, *noise, floors, peaks, scores, drawn_ids)
    _peaks_kernel[(num_rows, splits)](*row, split_size, peaks, peak_ids, BLOCK=_BLOCK)
    _draw_kernel[(num_rows, splits)](*draw, AGAIN=False, BLOCK=_BLOCK)
    tiles = triton.cdiv(vocab_size, _TILE)
    near = logits.new_empty(num_rows, tiles * _CAPACITY)
    counts = peak_ids.new_empty(num_rows, tiles)
    masses, near_masses = (peaks.new_empty(num_rows, tiles) for _ in range(2))
    collected = (near, counts, masses, near_masses)
    filters = (params.temperatures, params.top_ks, params.top_ps)
    _collect_kernel[(num_rows, tiles)](
        *row,
        splits,
        *filters,
        peaks,
        *collected,
        TILE=_TILE,
        CAPACITY=_CAPACITY,
        NEAR=_NEAR,
        num_warps=8,
    )
    _judge_kernel[(num_rows,)](
        *row,
        splits,
        tiles,
        *filters,
        params.min_ps,
        peaks,
        scores,
        drawn_ids,
        *collected,
        floors,
        TILES=triton.next_power_of_2(tiles),
        CAPACITY=_CAPACITY,
        BLOCK=_JUDGED,
        PIVOTS=_PIVOTS,
        num_warps=16,
    )
    _draw_kernel[(num_rows, splits)](*draw, AGAIN=True, BLOCK=_BLOCK)
    _pick_kernel[(num_rows,)](
        splits,
        params.temperatures,
        peaks,
        peak_ids,
        scores,
        drawn_ids,
        token_ids,
        num_warps=1,
    )
    return token_ids


@triton.jit  # type: ignore[untyped-decorator]
def _peaks_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab_size,
    split_size,
    peaks,
    peak_ids,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The largest logit of a split and the first token that has it; +inf if the split has +inf or
    NaN, of which no row is drawn."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * split_size
    end = tl.minimum(begin + split_size, vocab_size)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + ids, mask=ids < end, other=float("-inf"))
        values = values.to(tl.float32)
        finite = values < float("inf")
        wrong = tl.where(finite, wrong, 1)
        # Of equals that a lane meets the first one stays.
        better = finite & (values > best)
        best_ids = tl.where(better, ids, best_ids)
        best = tl.where(better, values, best)
    peak = tl.max(best, axis=0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + place, tl.where(tl.max(wrong, axis=0) > 0, float("inf"), peak))
    tl.store(peak_ids + place, tl.min(tl.where(best == peak, best_ids, 0x7FFFFFFF), axis=0))


@triton.jit
def _best_of_splits(values, ids, row, splits):  # type: ignore[no-untyped-def]
    """The largest value that a row's splits found, and its token: the first one of equals."""
    split = tl.arange(0, _MAX_SPLITS)
    places = row * splits + split
    found = tl.load(values + places, mask=split < splits, other=float("-inf"))
    found_ids = tl.load(ids + places, mask=split < splits, other=0x7FFFFFFF)
    best = tl.max(found, axis=0)
    return best, tl.min(tl.where(found == best, found_ids, 0x7FFFFFFF), axis=0)


@triton.jit
def _largest_of_splits(values, row, splits):  # type: ignore[no-untyped-def]
    split = tl.arange(0, _MAX_SPLITS)
    found = tl.load(values + row * splits + split, mask=split < splits, other=float("-inf"))
    return tl.max(found, axis=0)


@triton.jit
def _is_drawn(peak, temperature):  # type: ignore[no-untyped-def]
    """Whether a row is drawn at all: it is not if it allows no token, or if it is greedy."""
    return (peak < float("inf")) & (peak > float("-inf")) & (temperature > 0)


@triton.jit
def _mass(values, peak, temperature):  # type: ignore[no-untyped-def]
    """Probabilities relative to that of the largest logit."""
    return tl.exp((values - peak) * (1.0 / tl.maximum(temperature, 1e-37)))


@triton.jit
def _min_p_floor(min_p):  # type: ignore[no-untyped-def]
    """The smallest scaled logit that min_p considers."""
    return tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))


@triton.jit
def _gumbel(words):  # type: ignore[no-untyped-def]
    """Noise of random words. The chance v of a larger one keeps its precision where it is small,
    which decides draws: there -ln(1 - v) is a power series."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = 1 / 5 + v * (1 / 6 + v * (1 / 7))
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * series))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(1.0 - v)))


@triton.jit  # type: ignore[untyped-decorator]
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab_size,
    split_size,
    temperatures,
    min_ps,
    seeds,
    positions,
    floors,
    peaks,
    scores,
    drawn_ids,
    AGAIN: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The largest sum of scaled logit and noise in a split, of the scaled logits from a floor up:
    first that of min_p, and when drawing again the judge's, +inf where the winner stands."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    peak = _largest_of_splits(peaks, row, splits)
    floor = tl.load(floors + row) if AGAIN else _min_p_floor(tl.load(min_ps + row))
    if _is_drawn(peak, temperature) & (floor < float("inf")):
        begin = tl.program_id(1) * split_size
        end = tl.minimum(begin + split_size, vocab_size)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_ids = tl.zeros([BLOCK], tl.int32)
        for first in range(begin, end, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            values = tl.load(logits + row * row_stride + ids, mask=ids < end, other=float("-inf"))
            scaled = tl.div_rn(values.to(tl.float32) - peak, temperature)
            noise = _gumbel(random_words(seed, position, first // 4, BLOCK // 4))
            sums = tl.where(scaled >= floor, scaled + noise, float("-inf"))
            better = sums > best
            best_ids = tl.where(better, ids, best_ids)
            best = tl.where(better, sums, best)
        score = tl.max(best, axis=0)
        place = row * splits + tl.program_id(1)
        tl.store(scores + place, score)
        tl.store(drawn_ids + place, tl.min(tl.where(best == score, best_ids, 0x7FFFFFFF), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _above(  # type: ignore[no-untyped-def]
    row_logits,
    vocab_size,
    peak,
    temperature,
    bound,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """How many logits are above a bound, the sum of their exponentials, and how many equal it."""
    counts = tl.zeros([BLOCK], tl.int32)
    equals = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf"))
        values = values.to(tl.float32)
        is_above = values > bound
        counts += is_above.to(tl.int32)
        equals += (values == bound).to(tl.int32)
        sums += tl.where(is_above, _mass(values, peak, temperature), 0.0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0), tl.sum(equals, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _last_considered(  # type: ignore[no-untyped-def]
    row_logits,
    vocab_size,
    peak,
    temperature,
    target,
    winner,
    is_mass,
    is_exact,
    BLOCK: tl.constexpr,  # noqa: N803
    PIVOTS: tl.constexpr,  # noqa: N803
):
    """The smallest logit with less than `target` above it, in tokens or in exponentials' sum.

    Unless it has to be exact, any bound from there to the winner's logit will do if the winner is
    not below it. The sum above a bound is the same in every pass, and never rises with the bound.
    """
    below = peak - float("inf")
    low = below
    high = peak
    # A guess at the first step down; any would do.
    start = tl.where(is_exact, tl.minimum(winner, peak - 8.0 * temperature), winner)
    shares = tl.arange(0, PIVOTS).to(tl.float32) / PIVOTS
    # (-inf, below] not considered  (below, high] the last one is here  (high, peak] considered
    while (low < high) & (is_exact | (high > winner)):
        # Not of the difference, which may be more than the largest float.
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
def _filters(top_ks, top_ps, vocab_size, row):  # type: ignore[no-untyped-def]
    """top_k and top_p, each with whether it leaves anything out."""
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    return top_k, (top_k > 0) & (top_k < vocab_size), top_p, top_p < 1


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _collect_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    vocab_size,
    splits,
    temperatures,
    top_ks,
    top_ps,
    peaks,
    near,
    counts,
    masses,
    near_masses,
    TILE: tl.constexpr,  # noqa: N803
    CAPACITY: tl.constexpr,  # noqa: N803
    NEAR: tl.constexpr,  # noqa: N803
):
    """Of one tile: its mass, and how many logits near the largest one it has, with what mass. The
    first of them stand in `near`, followed by -inf."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak = _largest_of_splits(peaks, row, splits)
    _, has_k, _, has_p = _filters(top_ks, top_ps, vocab_size, row)
    if _is_drawn(peak, temperature) & (has_k | has_p):
        place = row * tl.num_programs(1) + tl.program_id(1)
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = ids < vocab_size
        raw = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
        values = raw.to(tl.float32)
        mass = _mass(values, peak, temperature)
        is_near = values >= peak - NEAR * temperature
        number = tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        count = tl.max(number, axis=0) + 1
        tl.store(counts + place, count)
        tl.store(masses + place, tl.sum(mass, axis=0))
        tl.store(near_masses + place, tl.sum(tl.where(is_near, mass, 0.0), axis=0))
        found = near + place * CAPACITY
        tl.store(found + number, raw, mask=is_near & (number < CAPACITY))
        rest = tl.arange(0, CAPACITY)
        tl.store(found + rest, float("-inf"), mask=rest >= count)


@triton.jit(do_not_specialize=["splits", "tiles"])  # type: ignore[untyped-decorator]
def _judge_kernel(  # type: ignore[no-untyped-def]
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
    drawn_ids,
    near,
    counts,
    masses,
    near_masses,
    floors,
    TILES: tl.constexpr,  # noqa: N803
    CAPACITY: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PIVOTS: tl.constexpr,  # noqa: N803
):
    """The smallest scaled logit that a row's filters consider, or +inf if its winner stands."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak = _largest_of_splits(peaks, row, splits)
    top_k, has_k, top_p, has_p = _filters(top_ks, top_ps, vocab_size, row)
    floor = float("inf")
    if _is_drawn(peak, temperature) & (has_k | has_p):
        tile = tl.arange(0, TILES)
        count = tl.load(counts + row * tiles + tile, mask=tile < tiles, other=0)
        mass = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0.0)
        near_mass = tl.load(near_masses + row * tiles + tile, mask=tile < tiles, other=0.0)
        total = tl.sum(mass, axis=0)
        has_last = tl.where(
            has_k, tl.sum(count, axis=0) >= top_k, tl.sum(near_mass, axis=0) >= top_p * total
        )
        # Where the last logit considered is, and all above it.
        source = logits + row * row_stride
        size = vocab_size
        if has_last & (tl.max(count, axis=0) <= CAPACITY):
            source = near + row * tiles * CAPACITY
            size = tiles * CAPACITY
        _, winner_id = _best_of_splits(scores, drawn_ids, row, splits)
        winner = tl.load(logits + row * row_stride + winner_id).to(tl.float32)
        last = peak - float("inf")
        if has_k:
            last = _last_considered(
                source,
                size,
                peak,
                temperature,
                top_k.to(tl.float32),
                winner,
                False,
                has_p,
                BLOCK,
                PIVOTS,
            )
        if has_p:
            if has_k:
                above, mass_above, equal = _above(source, size, peak, temperature, last, BLOCK)
                # Of tokens as likely as the last one as many count as complete top_k.
                missing = tl.minimum(top_k - above, equal).to(tl.float32)
                total = mass_above + missing * _mass(last, peak, temperature)
            # The most likely token always stays, and has a mass of 1.
            target = tl.maximum(top_p * total, 0.5)
            last_of_p = _last_considered(
                source,
                size,
                peak,
                temperature,
                target,
                winner,
                True,
                False,
                BLOCK,
                PIVOTS,
            )
            last = tl.maximum(last, last_of_p)
        if last > winner:
            min_p_floor = _min_p_floor(tl.load(min_ps + row))
            floor = tl.maximum(tl.div_rn(last - peak, temperature), min_p_floor)
    tl.store(floors + row, floor)


@triton.jit(do_not_specialize=["splits"])
def _pick_kernel(  # type: ignore[no-untyped-def]
    splits,
    temperatures,
    peaks,
    peak_ids,
    scores,
    drawn_ids,
    token_ids,
):
    """A row's token: the winner, the most likely one of a greedy row, or NO_TOKEN."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak, token = _best_of_splits(peaks, peak_ids, row, splits)
    possible = (peak < float("inf")) & (peak > float("-inf"))
    if _is_drawn(peak, temperature):
        _, token = _best_of_splits(scores, drawn_ids, row, splits)
    tl.store(token_ids + row, tl.where(possible, token, -1).to(tl.int64))

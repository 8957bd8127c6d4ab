"""Sampling kernels that process one split of a row each: peaks and Gumbel argmax, and their
merge."""

from typing import Final

import triton
import triton.language as tl

from kernels.gpu.philox import random_words

# The most splits of a row. Kernels load as many at once, so that any number shares one compilation.
MAX_SPLITS: Final = tl.constexpr(64)


@triton.jit
def peaks_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, vocab_size, split_size, peaks, peak_ids, BLOCK: tl.constexpr
):
    """The largest logit of a split and the first token that has it; +inf if the split has +inf or
    NaN, which make a row invalid."""
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
        # Of equal values in a lane the first one is kept.
        better = finite & (values > best)
        best_ids = tl.where(better, ids, best_ids)
        best = tl.where(better, values, best)
    peak = tl.max(best, axis=0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + place, tl.where(tl.max(wrong, axis=0) > 0, float("inf"), peak))
    tl.store(peak_ids + place, tl.min(tl.where(best == peak, best_ids, 0x7FFFFFFF), axis=0))


@triton.jit
def argmax_kernel(  # type: ignore[no-untyped-def]
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
    argmax_ids,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a split's largest sum of scaled logit and Gumbel noise, and its token. Considers scaled
    logits of at least a floor: that of min_p or, if FILTERED, that of `filter_kernel`, which is
    +inf where the first argmax is kept."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    peak = largest_of_splits(peaks, row, splits)
    floor = tl.load(floors + row) if FILTERED else min_p_floor(tl.load(min_ps + row))
    if is_sampled(peak, temperature) & (floor < float("inf")):
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
        tl.store(argmax_ids + place, tl.min(tl.where(best == score, best_ids, 0x7FFFFFFF), axis=0))


@triton.jit(do_not_specialize=["splits"])
def merge_splits_kernel(  # type: ignore[no-untyped-def]
    splits, temperatures, peaks, peak_ids, scores, argmax_ids, token_ids
):
    """Store a row's token: the Gumbel argmax, the most likely one of a greedy row, or NO_TOKEN."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    peak, token = best_of_splits(peaks, peak_ids, row, splits)
    possible = (peak < float("inf")) & (peak > float("-inf"))
    if is_sampled(peak, temperature):
        _, token = best_of_splits(scores, argmax_ids, row, splits)
    tl.store(token_ids + row, tl.where(possible, token, -1).to(tl.int64))


@triton.jit
def best_of_splits(values, ids, row, splits):  # type: ignore[no-untyped-def]
    """The largest value of a row's splits and its token, the first one of equals."""
    split = tl.arange(0, MAX_SPLITS)
    places = row * splits + split
    found = tl.load(values + places, mask=split < splits, other=float("-inf"))
    found_ids = tl.load(ids + places, mask=split < splits, other=0x7FFFFFFF)
    best = tl.max(found, axis=0)
    return best, tl.min(tl.where(found == best, found_ids, 0x7FFFFFFF), axis=0)


@triton.jit
def largest_of_splits(values, row, splits):  # type: ignore[no-untyped-def]
    split = tl.arange(0, MAX_SPLITS)
    found = tl.load(values + row * splits + split, mask=split < splits, other=float("-inf"))
    return tl.max(found, axis=0)


@triton.jit
def is_sampled(peak, temperature):  # type: ignore[no-untyped-def]
    """Whether a row is sampled: not if it allows no token, nor if it is greedy."""
    return (peak < float("inf")) & (peak > float("-inf")) & (temperature > 0)


@triton.jit
def min_p_floor(min_p):  # type: ignore[no-untyped-def]
    """The smallest scaled logit that min_p keeps."""
    return tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))


@triton.jit
def _gumbel(words):  # type: ignore[no-untyped-def]
    """Gumbel noise of random words. The probability v of larger noise must be precise where it is
    small, because large noise decides the argmax: there -ln(1 - v) is a power series."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = 1 / 5 + v * (1 / 6 + v * (1 / 7))
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * series))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(1.0 - v)))

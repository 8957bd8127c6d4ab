"""Masks and penalties in Triton: a program changes a tile of one line."""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_TILE: Final = 4096  # logits per program, a multiple of a mask's 32 bits


def apply_bitmask_triton(logits: Tensor, bitmask: Tensor, lines: Tensor) -> None:
    """`kernels.logits.apply_bitmask` in Triton, without checks of lines, which are on the
    device."""
    count, vocab_size = len(lines), logits.shape[1]
    if count:
        _bitmask_kernel[(count, triton.cdiv(vocab_size, _TILE))](
            logits, logits.stride(0), vocab_size, bitmask, bitmask.stride(0), lines, TILE=_TILE
        )


def apply_penalties_triton(
    logits: Tensor, counts: Tensor, lines: Tensor, slots: Tensor, penalties: Tensor
) -> None:
    """`kernels.logits.apply_penalties` in Triton, without checks of lines and slots."""
    count, vocab_size = len(lines), logits.shape[1]
    if count:
        _penalties_kernel[(count, triton.cdiv(vocab_size, _TILE))](
            logits,
            logits.stride(0),
            vocab_size,
            counts,
            lines,
            slots,
            penalties,
            TILE=_TILE,
            # Products and sums are rounded separately, as in the reference.
            enable_fp_fusion=False,
        )


@triton.jit
def _bitmask_kernel(  # type: ignore[no-untyped-def]
    logits, line_stride, vocab_size, bitmask, width, lines, TILE: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + index)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tokens < vocab_size
    words = tl.load(bitmask + index * width + tokens // 32, mask=inside, other=-1)
    impossible = ((words >> (tokens % 32)) & 1) == 0
    places = logits + line * line_stride + tokens
    tl.store(places, float("-inf"), mask=inside & impossible)


@triton.jit
def _penalties_kernel(  # type: ignore[no-untyped-def]
    logits, line_stride, vocab_size, counts, lines, slots, penalties, TILE: tl.constexpr
):
    index = tl.program_id(0)
    line = tl.load(lines + index)
    slot = tl.load(slots + index)
    repetition = tl.load(penalties + 3 * slot)
    frequency = tl.load(penalties + 3 * slot + 1)
    presence = tl.load(penalties + 3 * slot + 2)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tokens < vocab_size
    found = tl.load(counts + slot * vocab_size + tokens, mask=inside, other=0)
    changed = found > 0
    places = logits + line * line_stride + tokens
    values = tl.load(places, mask=changed, other=0.0)
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    in_output = found >> 1
    penalized = values - frequency * in_output.to(tl.float32) - presence
    tl.store(places, tl.where(in_output > 0, penalized, values), mask=changed)

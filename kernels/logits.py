"""Changes of logits before sampling: masks of impossible tokens, and penalties for repetition.

All change the named lines of `logits [num_lines, vocab_size]` in place: float32, dense lines. A
line is changed by itself, so its result does not depend on the batch, and every implementation
computes the same bits.
"""

from typing import Final

import torch
from torch import Tensor

from kernels.dispatch import HAS_TRITON, Implementation, choose

if HAS_TRITON:
    from kernels.gpu.logits import apply_bitmask_triton, apply_penalties_triton

BITS: Final = 32  # tokens per word of a bitmask


def bitmask_width(vocab_size: int) -> int:
    """The number of words in a line of a bitmask."""
    return -(-vocab_size // BITS)


def apply_bitmask(
    logits: Tensor, bitmask: Tensor, lines: Tensor, *, implementation: Implementation | None = None
) -> None:
    """Set the logits of impossible tokens to -inf.

    `bitmask` is int32 `[len(lines), bitmask_width(vocab_size)]`, contiguous: line i is that of
    `logits[lines[i]]`. Token v is possible if bit `v % 32` of word `v // 32` is 1; the bits behind
    the last token are not read. `lines` is int64, with distinct values.
    """
    if implementation is None:
        implementation = choose(logits.device.type, (logits.dtype,))
    if implementation.is_cpp:
        torch.ops.quire.apply_bitmask(logits, bitmask, lines, implementation.isa)
    elif implementation == Implementation.TRITON:
        apply_bitmask_triton(logits, bitmask, lines)
    else:
        apply_bitmask_reference(logits, bitmask, lines)


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    lines: Tensor,
    slots: Tensor,
    penalties: Tensor,
    *,
    implementation: Implementation | None = None,
) -> None:
    """Apply repetition, frequency and presence penalties, in this order, as vLLM defines them.

    `counts` is int32 `[num_slots, vocab_size]`, contiguous: twice the number of a token's
    occurrences in the output, plus 1 if the prompt has it. `penalties` is float32 `[num_slots, 3]`:
    repetition, frequency, presence. `lines[i]` has the counts and penalties of `slots[i]`; both are
    int64, lines are distinct.

    A token of prompt or output has its logit divided by the repetition penalty if it is positive,
    else multiplied by it. Of a token of the output, the frequency penalty is subtracted once per
    occurrence, and the presence penalty once.
    """
    if implementation is None:
        implementation = choose(logits.device.type, (logits.dtype,))
    if implementation.is_cpp:
        torch.ops.quire.apply_penalties(logits, counts, lines, slots, penalties, implementation.isa)
    elif implementation == Implementation.TRITON:
        apply_penalties_triton(logits, counts, lines, slots, penalties)
    else:
        apply_penalties_reference(logits, counts, lines, slots, penalties)


def apply_bitmask_reference(logits: Tensor, bitmask: Tensor, lines: Tensor) -> None:
    """The reference of `apply_bitmask`, on any device."""
    bits = torch.arange(BITS, dtype=torch.int32, device=logits.device)
    possible = ((bitmask.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    changed = logits.index_select(0, lines).masked_fill_(~possible, float("-inf"))
    logits.index_copy_(0, lines, changed)


def apply_penalties_reference(
    logits: Tensor, counts: Tensor, lines: Tensor, slots: Tensor, penalties: Tensor
) -> None:
    """The reference of `apply_penalties`, on any device."""
    values, counts = logits.index_select(0, lines), counts.index_select(0, slots)
    repetition, frequency, presence = penalties.index_select(0, slots).unsqueeze(-1).unbind(1)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(counts > 0, repeated, values)
    in_output = counts >> 1
    penalized = values - frequency * in_output - presence
    logits.index_copy_(0, lines, torch.where(in_output > 0, penalized, values))

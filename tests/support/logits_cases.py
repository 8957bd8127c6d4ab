"""Random logits with masks and penalties, and what vLLM's definitions make of them, literally."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.typical_p import apply_typical_p_reference

INF = float("inf")
VOCAB_SIZES = [1, 31, 32, 33, 100, 4096, 5003, 16_385]


@dataclass(frozen=True)
class PenaltyCase:
    """The arguments of `apply_penalties`."""

    logits: Tensor
    counts: Tensor
    lines: Tensor
    slots: Tensor
    penalties: Tensor

    def to(self, device: str) -> "PenaltyCase":
        """A copy."""
        return PenaltyCase(*(tensor.to(device, copy=True) for tensor in vars(self).values()))

    def expected(self) -> Tensor:
        """One logit after another, in single precision."""
        logits = self.logits.clone()
        for line, slot in zip(self.lines.tolist(), self.slots.tolist(), strict=True):
            repetition, frequency, presence = self.penalties[slot]
            for token in self.counts[slot].nonzero().squeeze(1).tolist():
                logit, count = logits[line, token], int(self.counts[slot, token])
                # In the prompt or the output.
                logit = logit / repetition if logit > 0 else logit * repetition
                if count // 2:
                    logit = logit - frequency * (count // 2)
                    logit = logit - presence
                logits[line, token] = logit
        return logits


def random_logits(num_lines: int, vocab_size: int) -> Tensor:
    """Of lines that are apart in memory; some are infinite, or 0, or NaN."""
    logits = 5 * torch.randn(num_lines, vocab_size + 3)[:, :vocab_size]
    kinds = torch.rand(num_lines, vocab_size)
    logits[kinds < 0.05] = -INF
    logits[(kinds > 0.05) & (kinds < 0.07)] = 0.0
    logits[(kinds > 0.07) & (kinds < 0.08)] = torch.nan
    return logits


def penalty_case(vocab_size: int, num_lines: int = 7) -> PenaltyCase:
    """More slots than lines, and lines without penalties between the others."""
    counts = torch.randint(0, 9, (num_lines + 3, vocab_size), dtype=torch.int32)
    counts[torch.rand(counts.shape) < 0.8] = 0
    lines = torch.arange(0, num_lines, 2)
    penalties = torch.stack(
        [
            torch.empty(num_lines + 3).uniform_(0.5, 2),
            torch.empty(num_lines + 3).uniform_(-2, 2),
            torch.empty(num_lines + 3).uniform_(-2, 2),
        ],
        dim=1,
    )
    penalties[3] = torch.tensor([1.0, 0.0, 0.0])
    slots = torch.randperm(num_lines + 3)[: len(lines)]
    return PenaltyCase(random_logits(num_lines, vocab_size), counts, lines, slots, penalties)


@dataclass(frozen=True)
class MaskCase:
    """The arguments of `apply_bitmask`."""

    logits: Tensor
    bitmask: Tensor
    lines: Tensor

    def to(self, device: str) -> "MaskCase":
        """A copy."""
        return MaskCase(*(tensor.to(device, copy=True) for tensor in vars(self).values()))

    def expected(self) -> Tensor:
        """One bit after another."""
        logits = self.logits.clone()
        for line, words in zip(self.lines.tolist(), self.bitmask.tolist(), strict=True):
            for token in range(logits.shape[1]):
                if not words[token // 32] >> token % 32 & 1:
                    logits[line, token] = -INF
        return logits


def mask_case(vocab_size: int, num_lines: int = 7) -> MaskCase:
    """Whole words of either kind among mixed ones, and lines without a mask."""
    width = -(-vocab_size // 32)
    lines = torch.arange(0, num_lines, 2)
    words = torch.randint(-(2**31), 2**31, (len(lines), width)).int()
    kinds = torch.rand(words.shape)
    words[kinds < 0.3] = 0
    words[kinds > 0.7] = -1
    return MaskCase(random_logits(num_lines, vocab_size), words, lines)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, apart from NaN's many forms."""
    return torch.equal(a.nan_to_num(1e30, INF, -INF), b.nan_to_num(1e30, INF, -INF))


@dataclass(frozen=True)
class TypicalCase:
    """The arguments of `apply_typical_p`. The last three lines have no distribution."""

    logits: Tensor
    lines: Tensor
    temperatures: Tensor
    typical_ps: Tensor

    def to(self, device: str) -> "TypicalCase":
        """A copy."""
        return TypicalCase(*(tensor.to(device, copy=True) for tensor in vars(self).values()))

    def expected(self) -> tuple[Tensor, Tensor]:
        """The reference's result, and the lines in which rounding cannot change it."""
        expected, *others = (self._shifted(shift) for shift in (0.0, -1e-5, 1e-5))
        clear = torch.ones(len(expected), dtype=torch.bool)
        for other in others:
            clear &= ((other == expected) | expected.isnan()).all(-1)
        return expected, clear

    def _shifted(self, shift: float) -> Tensor:
        logits = self.logits.clone()
        ps = self.typical_ps + shift
        apply_typical_p_reference(logits, self.lines, self.temperatures, ps)
        return logits


def typical_case(vocab_size: int, num_lines: int) -> TypicalCase:
    logits = 3 * torch.randn(num_lines, vocab_size)
    logits[:, ::7] = -INF
    logits[:, 0] = 1.0
    logits[-3, -1], logits[-2, -1], logits[-1] = float("nan"), INF, -INF
    temperatures = torch.linspace(0.1, 3, num_lines)
    ps = torch.linspace(0.01, 0.999, num_lines)
    lines = torch.arange(num_lines).flip(0)
    return TypicalCase(logits, lines, temperatures, ps)

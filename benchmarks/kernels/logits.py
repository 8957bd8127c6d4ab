"""Changes of logits before sampling: masks, penalties and typical_p."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.kernels.limits import Limits
from benchmarks.kernels.timing import best_seconds
from benchmarks.report import Cell, Column, Part
from kernels.dispatch import Implementation
from kernels.logits import apply_bitmask, apply_penalties, bitmask_width
from kernels.typical_p import apply_typical_p

_NUM_ROWS, _VOCAB_SIZE = 32, 32_768
_NUM_COUNTED = 500  # different tokens of a row
_ROUNDS = 5

# Of logits; the implementation is the best one if None.
Change = Callable[[Tensor, Implementation | None], None]


@dataclass(frozen=True)
class Way:
    """An operation, and the bytes that it reads beside logits."""

    change: Change
    num_bytes: int


def logits(limits: Limits) -> Part:
    batch_bytes = _NUM_ROWS * _VOCAB_SIZE * 4
    batches = [2.5 * torch.randn(_NUM_ROWS, _VOCAB_SIZE) for _ in range(limits.enough(batch_bytes))]
    ways = {
        "a mask that allows a token of 100": _mask(0.01),
        "a mask that allows 99 tokens of 100": _mask(0.99),
        f"penalties of {_NUM_COUNTED} tokens": _penalties(),
        "typical_p 0.9": _typical_p(),
    }
    return Part(
        name="logits",
        title="Changes of logits",
        notes=[
            f"{_NUM_ROWS} rows of {_VOCAB_SIZE:,} logits, changed in place, again and again. "
            "*MB* are the logits, and masks or counts. *Torch*: the time of the references, which "
            "are torch's operations, over that of the kernel."
        ],
        columns=[
            Column("what", "operation"),
            Column("ms", "ms", ".2f"),
            Column("mb", "MB", ".1f"),
            Column("of_torch", "torch", ".1f"),
        ],
        rows=[_row(name, batches, way) for name, way in ways.items()],
        targets=[],
    )


def _row(what: str, batches: list[Tensor], way: Way) -> dict[str, Cell]:
    mine, others = cycle(batches), cycle(batches)
    seconds = best_seconds(
        {
            "ours": lambda: way.change(next(mine), None),
            "torch": lambda: way.change(next(others), Implementation.REFERENCE),
        },
        _ROUNDS,
    )
    return {
        "what": what,
        "ms": 1000 * seconds["ours"],
        "mb": (batches[0].nbytes + way.num_bytes) / 1e6,
        "of_torch": seconds["torch"] / seconds["ours"],
    }


def _mask(share: float) -> Way:
    width = bitmask_width(_VOCAB_SIZE)
    bits = torch.rand(_NUM_ROWS, width, 32) < share
    words = (bits.long() << torch.arange(32)).sum(-1)
    bitmask = torch.where(words < 2**31, words, words - 2**32).int()

    def change(batch: Tensor, implementation: Implementation | None) -> None:
        apply_bitmask(batch, bitmask, torch.arange(_NUM_ROWS), implementation=implementation)

    return Way(change, bitmask.nbytes)


def _penalties() -> Way:
    counts = torch.zeros(_NUM_ROWS, _VOCAB_SIZE, dtype=torch.int32)
    for row in counts:
        row[torch.randperm(_VOCAB_SIZE)[:_NUM_COUNTED]] = torch.randint(1, 9, (1,)).int()
    penalties = torch.tensor([[1.01, 0.1, 0.1]]).repeat(_NUM_ROWS, 1)
    lines = torch.arange(_NUM_ROWS)

    def change(batch: Tensor, implementation: Implementation | None) -> None:
        apply_penalties(batch, counts, lines, lines, penalties, implementation=implementation)

    return Way(change, counts.nbytes)


def _typical_p() -> Way:
    lines = torch.arange(_NUM_ROWS)
    temperatures, typical_ps = torch.ones(_NUM_ROWS), torch.full((_NUM_ROWS,), 0.9)

    def change(batch: Tensor, implementation: Implementation | None) -> None:
        # Of a copy: the second time would have other tokens to drop.
        apply_typical_p(
            batch.clone(), lines, temperatures, typical_ps, implementation=implementation
        )

    return Way(change, 0)

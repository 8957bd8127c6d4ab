"""A sample in a few numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self


@dataclass(frozen=True)
class Spread:
    """Of times in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """None of nothing."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            mean=fmean(ordered),
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of an ascending sequence that is not empty, linearly between the two nearest ranks, as
    NumPy's default is."""
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)

"""A histogram as lists of numbers, whose observations are cheap."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by their upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Each bound with the number of values up to it; the last bound is infinite."""
        return zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True)

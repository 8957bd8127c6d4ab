"""A histogram as lists of numbers, whose observations are cheap; buckets are accumulated by
scrapes."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by their upper bounds. Observed from one thread, read from any."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are ascending; a last bucket has no bound."""
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Add `value`, `times` times, to the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Each bound with the number of values up to it; the last bound is infinite."""
        # Copied once, so that the counts are consistent during concurrent observations.
        cumulated = accumulate(list(self._counts))
        return zip((*self._bounds, float("inf")), cumulated, strict=True)

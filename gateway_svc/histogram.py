"""A histogram that is quick to fill: its cost falls on those who read it."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Told as prometheus_client tells its own, which searches its buckets one by one under locks.

    Filled by one thread, read by any.
    """

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`bounds` are the buckets' upper ones, in their order; another bucket has all above."""
        self._name = name
        self._documentation = documentation
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """A value belongs to the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        # One look at the counts: what is told of them fits together while others are added.
        cumulated = accumulate(list(self._counts))
        bounds = map(floatToGoString, self._bounds)
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], list(zip(bounds, cumulated, strict=True)), self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        return [family]

"""A Prometheus histogram whose observations are cheap; buckets are accumulated by scrapes."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Exposed like the one of prometheus_client, which searches buckets linearly under locks.

    Observed from one thread, collected from any.
    """

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`bounds` are the buckets' upper bounds, ascending; a last bucket has no bound."""
        self._name = name
        self._documentation = documentation
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Add `value`, `times` times, to the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        # Copied once, so that the samples are consistent during concurrent observations.
        cumulated = accumulate(list(self._counts))
        bounds = map(floatToGoString, self._bounds)
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], list(zip(bounds, cumulated, strict=True)), self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        return [family]

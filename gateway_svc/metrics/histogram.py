"""A Prometheus histogram whose observations are cheap; buckets are accumulated by scrapes."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Observations:
    """What was observed under one value of the label."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the buckets' upper bounds, ascending; the last one is infinite."""
        self.created = time.time()
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * len(bounds)

    def observe(self, value: float, times: int = 1) -> None:
        """Add `value`, `times` times, to the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Each bound with the number of values up to it."""
        # Copied once, so that the counts are consistent during concurrent observations.
        cumulated = accumulate(list(self._counts))
        return list(zip(map(floatToGoString, self._bounds), cumulated, strict=True))


class Histogram(Collector):
    """Exposed like the one of prometheus_client, which searches buckets linearly under locks.

    It has one label. Observed from one thread, collected from any.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        label: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """`bounds` are the buckets' upper bounds, ascending; a last bucket has no bound."""
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = (*bounds, float("inf"))
        self._by_value: dict[str, Observations] = {}
        registry.register(self)

    def labels(self, value: str) -> Observations:
        """The observations under a value of the label, which are exposed from now on."""
        found = self._by_value.get(value)
        if found is None:
            found = self._by_value[value] = Observations(self._bounds)
        return found

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [self._family()]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = self._family()
        for value, observed in list(self._by_value.items()):
            family.add_metric([value], observed.buckets(), observed.sum)
            family.add_sample(f"{self._name}_created", {self._label: value}, observed.created)
        return [family]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=[self._label])

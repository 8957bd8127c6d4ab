"""A Prometheus histogram with a label whose observations are cheap."""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from quire.service.metrics.exposition import exposed_buckets
from quire.service.metrics.histogram import Histogram


class LabelledHistogram(Collector):
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
        self._bounds = bounds
        # By value of the label, with the times at which they were created.
        self._by_value: dict[str, tuple[Histogram, float]] = {}
        registry.register(self)

    def labels(self, value: str) -> Histogram:
        """The histogram of a value of the label, which is exposed from now on."""
        found = self._by_value.get(value)
        if found is None:
            found = self._by_value[value] = Histogram(self._bounds), time.time()
        return found[0]

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [self._family()]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = self._family()
        for value, (histogram, created) in list(self._by_value.items()):
            family.add_metric([value], exposed_buckets(histogram), histogram.sum)
            family.add_sample(f"{self._name}_created", {self._label: value}, created)
        return [family]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=[self._label])

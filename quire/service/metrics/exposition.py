"""Converts histograms to what prometheus_client exposes."""

from prometheus_client.utils import floatToGoString

from quire.service.metrics.histogram import Histogram


def exposed_buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """The buckets as `HistogramMetricFamily.add_metric` takes them."""
    bounds, counts = zip(*histogram.buckets(), strict=True)
    return list(zip(map(floatToGoString, bounds), counts, strict=True))

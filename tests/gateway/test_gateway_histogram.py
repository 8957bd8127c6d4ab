"""Histograms are exposed as prometheus_client exposes its own."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Theirs
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics

from gateway_svc.metrics.histogram import LabelledHistogram

BOUNDS = (0.001, 0.0025, 0.5, 1.0, 40.0)


def samples(
    registry: CollectorRegistry, generate: Callable[..., bytes]
) -> list[tuple[str, object]]:
    """Lines and their values; sums rounded, times of creation dropped."""
    found: list[tuple[str, object]] = []
    for line in generate(registry).decode().splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("#"):
            found.append((line, None))
        else:
            found.append((name, None if "_created" in name else round(float(value), 6)))
    return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.one_of(st.sampled_from([0.0, *BOUNDS]), st.floats(0, 100)),
            st.integers(1, 3),
        ),
        max_size=20,
    )
)
@settings(max_examples=100, deadline=None)
def test_exposition_equals_that_of_prometheus_client(
    observed: list[tuple[str, float, int]],
) -> None:
    our_registry, their_registry = CollectorRegistry(), CollectorRegistry()
    ours = LabelledHistogram("quire:seconds", "Time.", "kind", BOUNDS, our_registry)
    theirs = Theirs("quire:seconds", "Time.", ["kind"], buckets=BOUNDS, registry=their_registry)
    ours.labels("none")
    theirs.labels("none")
    for kind, value, times in observed:
        ours.labels(kind).observe(value, times)
        for _ in range(times):
            theirs.labels(kind).observe(value)
    for generate in (generate_latest, generate_open_metrics):
        assert samples(our_registry, generate) == samples(their_registry, generate)

"""Metrics by tenant: requests, tokens, and what counts against limits.

Their series are bounded by the API keys: a principal is a tenant of a keys file. Requests without
keys have an empty principal and no series. There may be tens of thousands: the event loop reads
numbers alone, and the thread of the scrape makes series of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from scheduler_svc.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class TenantReading:
    """The totals and the present usage of a tenant in one shard, at the time of a scrape."""

    tenant: str
    shard: str
    num_accepted: int
    num_prompt_tokens: int
    num_output_tokens: int
    # By reason.
    refused: Mapping[str, int]
    num_live: int
    num_waiting_tokens: int


_COUNTERS: Final[tuple[tuple[str, str, Callable[[TenantReading], int]], ...]] = (
    (
        "quire:tenant_requests_accepted",
        "Accepted requests of the tenant.",
        lambda reading: reading.num_accepted,
    ),
    (
        "quire:tenant_prompt_tokens",
        "Prompt tokens of accepted requests, cached ones included.",
        lambda reading: reading.num_prompt_tokens,
    ),
    (
        "quire:tenant_generation_tokens",
        "Output tokens of the tenant's requests, each counted once.",
        lambda reading: reading.num_output_tokens,
    ),
)


def read_tenants(engines: Mapping[str, Engine]) -> list[TenantReading]:
    """Read all tenants, by shard; on the event loop's thread."""
    readings = []
    for shard, engine in engines.items():
        if engine.shares.has_tenants:
            engine.count_output()
        readings += [
            TenantReading(
                name,
                shard,
                stats.num_accepted,
                stats.num_prompt_tokens,
                stats.num_output_tokens,
                dict(stats.refused),
                engine.quotas.num_live(name),
                engine.waiting.num_tokens_of(name),
            )
            for name, stats in engine.stats.tenants.items()
            if name
        ]
    return readings


def of_tenants(readings: Sequence[TenantReading]) -> Iterator[Metric]:
    """The metrics of what was read; on any thread."""
    labels = ["tenant", "shard"]
    for metric, meaning, count_of in _COUNTERS:
        counter = CounterMetricFamily(metric, meaning, labels=labels)
        for reading in readings:
            counter.add_metric([reading.tenant, reading.shard], count_of(reading))
        yield counter
    refused = CounterMetricFamily(
        "quire:tenant_requests_refused",
        "Requests of the tenant that the scheduler refused, by the error's reason.",
        labels=[*labels, "reason"],
    )
    live = GaugeMetricFamily(
        "quire:tenant_live_requests",
        "Requests of the tenant that have not ended, as its limit counts them.",
        labels=labels,
    )
    waiting = GaugeMetricFamily(
        "quire:tenant_queued_tokens",
        "Tokens of the tenant's queued requests that are not assigned to a worker.",
        labels=labels,
    )
    for reading in readings:
        values = [reading.tenant, reading.shard]
        for reason, count in reading.refused.items():
            refused.add_metric([*values, reason.lower()], count)
        live.add_metric(values, reading.num_live)
        waiting.add_metric(values, reading.num_waiting_tokens)
    yield from (refused, live, waiting)

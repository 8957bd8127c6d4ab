"""Metrics by tenant: requests, tokens, and what counts against limits.

Their series are bounded by the API keys: a principal is a tenant of a keys file. Requests without
keys have an empty principal and no series.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from scheduler_svc.core.stats import TenantStats
from scheduler_svc.engine.engine import Engine

_COUNTERS: Final[tuple[tuple[str, str, Callable[[TenantStats], int]], ...]] = (
    (
        "quire:tenant_requests_accepted",
        "Accepted requests of the tenant.",
        lambda stats: stats.num_accepted,
    ),
    (
        "quire:tenant_prompt_tokens",
        "Prompt tokens of accepted requests, cached ones included.",
        lambda stats: stats.num_prompt_tokens,
    ),
    (
        "quire:tenant_generation_tokens",
        "Sampled tokens of the tenant's requests, each counted once.",
        lambda stats: stats.num_output_tokens,
    ),
)


def of_tenants(engines: Mapping[str, Engine]) -> Iterator[Metric]:
    """Read the totals and the present usage of all tenants, by shard."""
    tenants: list[tuple[list[str], Engine, TenantStats]] = []
    for shard, engine in engines.items():
        if engine.shares.has_tenants:
            engine.count_output()
        named = [(name, stats) for name, stats in engine.stats.tenants.items() if name]
        tenants += [([name, shard], engine, stats) for name, stats in named]
    labels = ["tenant", "shard"]
    for metric, meaning, count_of in _COUNTERS:
        counter = CounterMetricFamily(metric, meaning, labels=labels)
        for values, _, stats in tenants:
            counter.add_metric(values, count_of(stats))
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
    for values, engine, stats in tenants:
        for reason, count in stats.refused.items():
            refused.add_metric([*values, reason.lower()], count)
        live.add_metric(values, engine.quotas.num_live(values[0]))
        waiting.add_metric(values, engine.waiting.num_tokens_of(values[0]))
    yield from (refused, live, waiting)

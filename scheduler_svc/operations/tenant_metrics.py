"""Metrics by tenant: requests, tokens, and what counts against limits.

Their series are bounded by the API keys: a principal is a tenant of a keys file. Requests without
keys have an empty principal and no series.
"""

from collections.abc import Callable, Iterator
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


def of_tenants(engine: Engine) -> Iterator[Metric]:
    """Read the totals and the present usage of all tenants of this term."""
    if engine.shares.has_tenants:
        engine.count_output()
    tenants = {name: stats for name, stats in engine.stats.tenants.items() if name}
    for name, meaning, count_of in _COUNTERS:
        counter = CounterMetricFamily(name, meaning, labels=["tenant"])
        for tenant, stats in tenants.items():
            counter.add_metric([tenant], count_of(stats))
        yield counter
    refused = CounterMetricFamily(
        "quire:tenant_requests_refused",
        "Requests of the tenant that the scheduler refused, by the error's reason.",
        labels=["tenant", "reason"],
    )
    live = GaugeMetricFamily(
        "quire:tenant_live_requests",
        "Requests of the tenant that have not ended, as its limit counts them.",
        labels=["tenant"],
    )
    waiting = GaugeMetricFamily(
        "quire:tenant_queued_tokens",
        "Tokens of the tenant's queued requests that are not assigned to a worker.",
        labels=["tenant"],
    )
    for tenant, stats in tenants.items():
        for reason, count in stats.refused.items():
            refused.add_metric([tenant, reason.lower()], count)
        live.add_metric([tenant], engine.quotas.num_live(tenant))
        waiting.add_metric([tenant], engine.waiting.num_tokens_of(tenant))
    yield from (refused, live, waiting)

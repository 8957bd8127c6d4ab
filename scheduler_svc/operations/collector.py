"""The scheduler's Prometheus collector: reads the engine's and lanes' counts at each scrape."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from quire.service.metrics.exposition import exposed_buckets
from quire.service.metrics.histogram import Histogram
from scheduler_svc.core.stats import EngineStats, LaneStats
from scheduler_svc.engine.engine import Engine
from scheduler_svc.lane.lane import Lane
from scheduler_svc.operations.step_histograms import StepHistograms, WorkerHistograms
from scheduler_svc.operations.tenant_metrics import TenantReading, of_tenants, read_tenants

_NS_PER_S: Final = 1e9
# Longer than any single callback of the event loop.
_READ_TIMEOUT_S: Final = 10.0

_Value = Callable[[Lane], float]
_Count = Callable[[LaneStats], float]

# Names follow vLLM's metrics where those exist.
_GAUGES: Final[tuple[tuple[str, str, _Value], ...]] = (
    (
        "quire:num_requests_running",
        "Sequences with a row on the worker.",
        lambda lane: len(lane.rows),
    ),
    (
        "quire:num_requests_assigned",
        "Sequences assigned to the worker that wait for a row.",
        lambda lane: len(lane.assigned),
    ),
    (
        "quire:num_requests_swapped",
        "Sequences whose blocks are swapped to host memory.",
        lambda lane: lane.num_swapped,
    ),
    (
        "quire:num_kv_cache_blocks",
        "Blocks of the KV cache, without the null block.",
        lambda lane: lane.worker.num_blocks - 1,
    ),
    (
        "quire:num_free_kv_cache_blocks",
        "Blocks without references, including cached prefixes.",
        lambda lane: lane.num_free_blocks,
    ),
    (
        "quire:kv_cache_usage_perc",
        "Fraction of the KV cache's blocks with references; 1 means all.",
        lambda lane: 1 - lane.num_free_blocks / (lane.worker.num_blocks - 1),
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, _Count], ...]] = (
    ("quire:num_steps", "Steps of the worker.", lambda stats: stats.num_steps),
    (
        "quire:prompt_tokens",
        "Prompt tokens computed, including recomputed ones.",
        lambda stats: stats.num_prefill_tokens,
    ),
    (
        "quire:generation_tokens",
        "Sampled tokens, including those after the end of an output.",
        lambda stats: stats.num_sampled_tokens,
    ),
    (
        "quire:forced_tokens",
        "Output tokens that jumps have added: their grammar left no choice.",
        lambda stats: stats.num_forced_tokens,
    ),
    (
        "quire:row_steps",
        "Steps of rows that gave output tokens; one may give several.",
        lambda stats: stats.num_row_steps,
    ),
    (
        "quire:spec_decode_num_drafts",
        "Steps of rows with tokens that speculation has proposed.",
        lambda stats: stats.draft_tokens[0],
    ),
    (
        "quire:spec_decode_num_draft_tokens",
        "Tokens that speculation has proposed.",
        lambda stats: stats.draft_tokens.total(),
    ),
    (
        "quire:spec_decode_num_accepted_tokens",
        "Proposed tokens that were sampled, too.",
        lambda stats: stats.accepted_tokens.total(),
    ),
    (
        "quire:prefix_cache_queries",
        "Tokens of admitted sequences.",
        lambda stats: stats.num_queried_tokens,
    ),
    (
        "quire:prefix_cache_hits",
        "Tokens of admitted sequences that were found in the prefix cache.",
        lambda stats: stats.num_hit_tokens,
    ),
    (
        "quire:recovered_tokens",
        "Tokens of sequences readmitted after their worker or leader was lost.",
        lambda stats: stats.num_recovered_tokens,
    ),
    (
        "quire:recovered_tokens_cached",
        "Tokens of such sequences found in the prefix cache; the rest were recomputed.",
        lambda stats: stats.num_recovered_hit_tokens,
    ),
    ("quire:redis_calls", "Redis calls for steps.", lambda stats: stats.num_redis_calls),
    (
        "quire:worker_idle_seconds",
        "Time between the steps of the worker.",
        lambda stats: stats.worker_idle_ns / _NS_PER_S,
    ),
    (
        "quire:worker_busy_seconds",
        "Time during which the worker ran steps.",
        lambda stats: stats.worker_busy_ns / _NS_PER_S,
    ),
)
_LEVELS: Final[tuple[tuple[str, str, Callable[[Engine], float]], ...]] = (
    (
        "quire:num_requests_waiting",
        "Sequences that wait for a row, assigned to a worker or not.",
        lambda engine: (
            len(engine.waiting) + sum(len(lane.assigned) for lane in engine.lanes.values())
        ),
    ),
    (
        "quire:num_requests_live",
        "Sequences of live requests.",
        lambda engine: engine.num_sequences,
    ),
    (
        "quire:num_queued_tokens",
        "Tokens of queued requests that are not assigned to a worker.",
        lambda engine: engine.waiting.num_tokens,
    ),
)
_TOTALS: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("quire:requests_accepted", "Accepted requests.", lambda stats: stats.num_accepted),
    ("quire:requests_refused", "Refused requests.", lambda stats: stats.num_refused),
    (
        "quire:sequences_recovered",
        "Sequences requeued because their worker was lost.",
        lambda stats: stats.num_recovered,
    ),
)
_COUNTERS_BY_POSITION: Final[tuple[tuple[str, str, Callable[[LaneStats], Counter[int]]], ...]] = (
    (
        "quire:spec_decode_num_draft_tokens_per_pos",
        "Proposed tokens by their position behind a row's last token, from 0.",
        lambda stats: stats.draft_tokens,
    ),
    (
        "quire:spec_decode_num_accepted_tokens_per_pos",
        "Proposed tokens that were sampled, too, by position.",
        lambda stats: stats.accepted_tokens,
    ),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[WorkerHistograms], Histogram]], ...]] = (
    (
        "quire:step_time_seconds",
        "Time from sending a plan to receiving its result.",
        lambda steps: steps.step_s,
    ),
    (
        "quire:scheduling_time_seconds",
        "The scheduler's work for a step, without waiting for Redis.",
        lambda steps: steps.scheduling_s,
    ),
    (
        "quire:redis_time_seconds",
        "Time of the Redis calls of a step, with packing.",
        lambda steps: steps.redis_s,
    ),
    (
        "quire:iteration_tokens_total",
        "Tokens that a plan computes in all its rounds.",
        lambda steps: steps.num_scheduled_tokens,
    ),
)


class EngineCollector(Collector):
    """Serves scrapes, which run on other threads, by reading on the event loop's thread.

    Without an engine, while others lead, it reports only `quire:leader` and `quire:num_shards`.
    """

    def __init__(
        self,
        steps: StepHistograms,
        engines: Callable[[], Mapping[int, Engine | None]],
        holds_lease: Callable[[int], bool],
    ) -> None:
        """`engines` returns those of all shards, None for shards that others lead; `holds_lease`
        whether the lease of a shard with an engine has certainly not expired."""
        self._engines = engines
        self._holds_lease = holds_lease
        self._steps = steps
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        metrics, tenants = reading.result(_READ_TIMEOUT_S)
        yield from metrics
        if tenants is not None:
            yield from of_tenants(tenants)

    async def _read(self) -> tuple[list[Metric], list[TenantReading] | None]:
        """The metrics, and what those of tenants are made of; None without an engine."""
        by_shard = self._engines()
        leads = GaugeMetricFamily(
            "quire:leader",
            "1 if this scheduler leads the shard, 0 if not, or if its lease may have expired.",
            labels=["shard"],
        )
        for shard, engine in by_shard.items():
            leads.add_metric([str(shard)], engine is not None and self._holds_lease(shard))
        num_shards = GaugeMetricFamily("quire:num_shards", "Shards of all schedulers.")
        num_shards.add_metric([], len(by_shard))
        engines = {str(shard): engine for shard, engine in by_shard.items() if engine is not None}
        if not engines:
            return [leads, num_shards], None
        lanes = [lane for engine in engines.values() for lane in engine.lanes.values()]
        metrics = [
            leads,
            num_shards,
            *_of_engines(engines),
            *_of_lanes(lanes),
            *self._of_steps(lanes),
        ]
        return metrics, read_tenants(engines)

    def _of_steps(self, lanes: list[Lane]) -> Iterator[Metric]:
        steps = self._steps.of(lane.worker.incarnation for lane in lanes)
        for name, meaning, histogram_of in _HISTOGRAMS:
            family = HistogramMetricFamily(name, meaning, labels=["worker"])
            for incarnation, histograms in steps.items():
                histogram = histogram_of(histograms)
                family.add_metric([_hex(incarnation)], exposed_buckets(histogram), histogram.sum)
            yield family


def _of_engines(engines: Mapping[str, Engine]) -> Iterator[Metric]:
    for name, meaning, level_of in _LEVELS:
        gauge = GaugeMetricFamily(name, meaning, labels=["shard"])
        for shard, engine in engines.items():
            gauge.add_metric([shard], level_of(engine))
        yield gauge
    for name, meaning, total_of in _TOTALS:
        counter = CounterMetricFamily(name, meaning, labels=["shard"])
        for shard, engine in engines.items():
            counter.add_metric([shard], total_of(engine.stats))
        yield counter
    waited = HistogramMetricFamily(
        "quire:request_queue_time_seconds",
        "Time from a request's acceptance to its first row.",
        labels=["tenant_class", "shard"],
    )
    ended = CounterMetricFamily(
        "quire:sequences_ended",
        "Ended choices by end reason, where stop_string includes complete calls of a tool; failed "
        "requests by gRPC status code in lower case.",
        labels=["reason", "shard"],
    )
    for shard, engine in engines.items():
        for tenant_class, histogram in engine.stats.queue_times.by_class.items():
            waited.add_metric([tenant_class, shard], exposed_buckets(histogram), histogram.sum)
        for reason, count in engine.stats.ended.items():
            ended.add_metric([reason, shard], count)
    yield waited
    yield ended


def _of_lanes(lanes: list[Lane]) -> Iterator[Metric]:
    for name, meaning, value_of in _GAUGES:
        gauge = GaugeMetricFamily(name, meaning, labels=["worker"])
        for lane in lanes:
            gauge.add_metric([_worker(lane)], value_of(lane))
        yield gauge
    for name, meaning, count_of in _COUNTERS:
        counter = CounterMetricFamily(name, meaning, labels=["worker"])
        for lane in lanes:
            counter.add_metric([_worker(lane)], count_of(lane.stats))
        yield counter
    yield from _of_drafts(lanes)
    preemptions = CounterMetricFamily(
        "quire:num_preemptions", "Preempted sequences.", labels=["worker", "kind"]
    )
    for lane in lanes:
        preemptions.add_metric([_worker(lane), "recompute"], lane.stats.num_preempted_by_recompute)
        preemptions.add_metric([_worker(lane), "swap"], lane.stats.num_preempted_by_swap)
    yield preemptions


def _of_drafts(lanes: list[Lane]) -> Iterator[Metric]:
    """Drafts by position; without a series for a worker that does not speculate."""
    for name, meaning, counts_of in _COUNTERS_BY_POSITION:
        counter = CounterMetricFamily(name, meaning, labels=["worker", "position"])
        for lane in lanes:
            for position, count in sorted(counts_of(lane.stats).items()):
                counter.add_metric([_worker(lane), str(position)], count)
        yield counter


def _worker(lane: Lane) -> str:
    return _hex(lane.worker.incarnation)


def _hex(incarnation: int) -> str:
    """Format as in Redis keys and logs."""
    return f"{incarnation:016x}"

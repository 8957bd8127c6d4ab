"""The scheduler's metrics: what the engine and its lanes have counted, read when asked for."""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from scheduler_svc.core.stats import LaneStats
from scheduler_svc.operations.step_times import Histogram, StepTimes, WorkerHistograms
from scheduler_svc.operations.views import EngineView, LaneView

_NS_PER_S: Final = 1e9
# Longer than the loop is ever busy in one go.
_READ_TIMEOUT_S: Final = 10.0

_Value = Callable[[LaneView], float]
_Count = Callable[[LaneStats], float]

# Names follow vLLM's where it has the same thing.
_GAUGES: Final[tuple[tuple[str, str, _Value], ...]] = (
    (
        "quire:num_requests_running",
        "Sequences that have a row on the worker.",
        lambda lane: len(lane.rows),
    ),
    (
        "quire:num_requests_assigned",
        "Waiting sequences that the worker has been chosen for.",
        lambda lane: len(lane.assigned),
    ),
    (
        "quire:num_requests_swapped",
        "Sequences whose blocks are in host memory.",
        lambda lane: lane.num_swapped,
    ),
    (
        "quire:num_kv_cache_blocks",
        "Blocks of the cache, without the null block.",
        lambda lane: lane.worker.num_blocks - 1,
    ),
    (
        "quire:num_free_kv_cache_blocks",
        "Blocks that nobody holds; prefixes may still be found in them.",
        lambda lane: lane.num_free_blocks,
    ),
    (
        "quire:kv_cache_usage_perc",
        "Share of the cache's blocks that are held; 1 is all of them.",
        lambda lane: 1 - lane.num_free_blocks / (lane.worker.num_blocks - 1),
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, _Count], ...]] = (
    ("quire:num_steps", "Steps of the worker.", lambda stats: stats.num_steps),
    (
        "quire:prompt_tokens",
        "Prompt tokens that steps computed, those of recomputed sequences included.",
        lambda stats: stats.num_prefill_tokens,
    ),
    (
        "quire:generation_tokens",
        "Tokens that were sampled.",
        lambda stats: stats.num_sampled_tokens,
    ),
    (
        "quire:prefix_cache_queries",
        "Tokens of admitted sequences.",
        lambda stats: stats.num_queried_tokens,
    ),
    (
        "quire:prefix_cache_hits",
        "Tokens of admitted sequences that the prefix cache had.",
        lambda stats: stats.num_hit_tokens,
    ),
    (
        "quire:recovered_tokens",
        "Tokens of sequences that were admitted again after their worker or leader was lost.",
        lambda stats: stats.num_recovered_tokens,
    ),
    (
        "quire:recovered_tokens_cached",
        "Tokens of such sequences that the prefix cache had; the others were computed again.",
        lambda stats: stats.num_recovered_hit_tokens,
    ),
    ("quire:redis_calls", "Calls of Redis for steps.", lambda stats: stats.num_redis_calls),
    (
        "quire:worker_idle_seconds",
        "Time in which the worker had no step to run.",
        lambda stats: stats.worker_idle_ns / _NS_PER_S,
    ),
    (
        "quire:worker_busy_seconds",
        "Time in which the worker ran steps.",
        lambda stats: stats.worker_busy_ns / _NS_PER_S,
    ),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[WorkerHistograms], Histogram]], ...]] = (
    (
        "quire:step_time_seconds",
        "From a plan's sending to its result.",
        lambda steps: steps.step_s,
    ),
    (
        "quire:scheduling_time_seconds",
        "The scheduler's own work for a step.",
        lambda steps: steps.scheduling_s,
    ),
    (
        "quire:redis_time_seconds",
        "Waiting for Redis for a step.",
        lambda steps: steps.redis_s,
    ),
    (
        "quire:iteration_tokens_total",
        "Tokens that a plan computes, all its rounds.",
        lambda steps: steps.num_scheduled_tokens,
    ),
)


class EngineCollector(Collector):
    """Reads on the loop's thread, to which everything belongs; scrapes come on threads.

    Without an engine, while another scheduler leads, there is nothing more to tell.
    """

    def __init__(self, steps: StepTimes) -> None:
        self.engine: EngineView | None = None
        self._steps = steps
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        reading = asyncio.run_coroutine_threadsafe(self._read(), self._loop)
        return reading.result(_READ_TIMEOUT_S)

    async def _read(self) -> list[Metric]:
        engine = self.engine
        leads = GaugeMetricFamily(
            "quire:leader",
            "1 where this scheduler leads, 0 where it stands by.",
            engine is not None,
        )
        if engine is None:
            return [leads]
        lanes = list(engine.lanes.values())
        return [leads, *_of_engine(engine), *_of_lanes(lanes), *self._of_steps(lanes)]

    def _of_steps(self, lanes: list[LaneView]) -> Iterator[Metric]:
        steps = self._steps.of(lane.worker.incarnation for lane in lanes)
        for name, meaning, histogram_of in _HISTOGRAMS:
            family = HistogramMetricFamily(name, meaning, labels=["worker"])
            for incarnation, histograms in steps.items():
                histogram = histogram_of(histograms)
                buckets = [(_bound(bound), count) for bound, count in histogram.buckets()]
                family.add_metric([_hex(incarnation)], buckets, histogram.sum)
            yield family


def _of_engine(engine: EngineView) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "quire:num_requests_waiting",
        "Sequences that wait for a row, whether a worker has been chosen for them or not.",
        len(engine.waiting) + sum(len(lane.assigned) for lane in engine.lanes.values()),
    )
    yield GaugeMetricFamily(
        "quire:num_queued_tokens",
        "Tokens of requests that no worker has been chosen for.",
        engine.waiting.num_tokens,
    )
    stats = engine.stats
    yield CounterMetricFamily(
        "quire:requests_accepted", "Requests that were accepted.", stats.num_accepted
    )
    yield CounterMetricFamily(
        "quire:requests_refused", "Requests that were refused.", stats.num_refused
    )
    yield CounterMetricFamily(
        "quire:sequences_recovered",
        "Sequences that went back to the queue because their worker was lost.",
        stats.num_recovered,
    )
    ended = CounterMetricFamily(
        "quire:sequences_ended",
        "Sequences that are over, by a reason or a gRPC code.",
        labels=["reason"],
    )
    for reason, count in stats.ended.items():
        ended.add_metric([reason], count)
    yield ended


def _of_lanes(lanes: list[LaneView]) -> Iterator[Metric]:
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
    preemptions = CounterMetricFamily(
        "quire:num_preemptions", "Preempted sequences.", labels=["worker", "kind"]
    )
    for lane in lanes:
        preemptions.add_metric([_worker(lane), "recompute"], lane.stats.num_preempted_by_recompute)
        preemptions.add_metric([_worker(lane), "swap"], lane.stats.num_preempted_by_swap)
    yield preemptions


def _worker(lane: LaneView) -> str:
    return _hex(lane.worker.incarnation)


def _hex(incarnation: int) -> str:
    """As keys and logs write it."""
    return f"{incarnation:016x}"


def _bound(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else str(bound)

import asyncio
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from checking_worker import CheckingWorker
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from scheduler_stack import num_in_flight, running_stack
from scripted_engine import FREE, HELD, ScriptedEngine
from waiting import until

from quire.internal.v1.scheduler_pb2 import TenantPolicy
from quire.service.lifecycle import Signals
from quire.service.metrics.server import MetricsServer, start_metrics
from scheduler_svc.core.limits import Reservation
from scheduler_svc.core.stats import LaneStats, StepTiming
from scheduler_svc.operations.collector import EngineCollector
from scheduler_svc.operations.step_histograms import StepHistograms
from scheduler_svc.server import Scheduler
from scheduler_svc.settings import SchedulerSettings

A, B = f"{10:016x}", f"{11:016x}"

Samples = dict[tuple[str, ...], float]


async def scrape(address: str) -> Samples:
    """Every sample, by its name without the prefix and then its labels' values, worker first."""

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            return response.read().decode()

    text = await asyncio.to_thread(get)
    return {
        (
            sample.name.removeprefix("quire:"),
            *(value for _, value in sorted(sample.labels.items(), reverse=True)),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
async def steps() -> StepHistograms:
    return StepHistograms()


@pytest.fixture
async def engines() -> dict[int, ScriptedEngine | None]:
    """By shard; the test fills it."""
    return {0: None}


@pytest.fixture
async def leases() -> dict[int, bool]:
    """Whether the lease is held, by shard."""
    return {0: True, 1: True}


@pytest.fixture
async def collector(
    steps: StepHistograms, engines: dict[int, ScriptedEngine | None], leases: dict[int, bool]
) -> EngineCollector:
    return EngineCollector(steps, lambda: engines, leases.__getitem__)


@pytest.fixture
async def server(collector: EngineCollector) -> AsyncIterator[MetricsServer]:
    registry = CollectorRegistry()
    registry.register(collector)
    server = await start_metrics("127.0.0.1:0", registry)
    yield server
    await server.stop()


async def test_a_standby_reports_only_that_it_does_not_lead(server: MetricsServer) -> None:
    assert await scrape(server.address) == {("leader", "0"): 0, ("num_shards",): 1}


async def test_a_leader_whose_lease_may_have_expired_does_not_report_to_lead(
    server: MetricsServer, engines: dict, leases: dict
) -> None:
    """As while Redis is away; its engine is reported as before."""
    engines[0] = ScriptedEngine()
    assert (await scrape(server.address))["leader", "0"] == 1
    leases[0] = False
    seen = await scrape(server.address)
    assert seen["leader", "0"] == seen["requests_accepted_total", "0"] == 0


async def test_the_engine_and_its_lanes_are_reported(server: MetricsServer, engines: dict) -> None:
    engine = engines[0] = ScriptedEngine()
    lane = engine.add(10, HELD, HELD, *[FREE] * 8)
    lane.rows, lane.assigned, lane.num_swapped = [1, 2, 3], [4], 2
    lane.stats = LaneStats(
        num_steps=7,
        num_prefill_tokens=30,
        num_scheduled_tokens=50,
        num_sampled_tokens=20,
        num_forced_tokens=3,
        draft_tokens=Counter({0: 8, 1: 5}),
        accepted_tokens=Counter({0: 4, 1: 2}),
        num_queried_tokens=100,
        num_hit_tokens=48,
        num_recovered_tokens=40,
        num_recovered_hit_tokens=32,
        num_preempted_by_recompute=1,
        num_preempted_by_swap=2,
        num_redis_calls=9,
        worker_idle_ns=1_500_000_000,
        worker_busy_ns=2_500_000_000,
    )
    engine.add(11, FREE, FREE)
    engine.waiting.extend([100, 20])
    engine.stats.num_accepted, engine.stats.num_refused = 5, 1
    engine.stats.num_recovered = 3
    engine.stats.end("length")
    engine.stats.queue_times.set_class("t", "fast")
    engine.stats.queue_times.start("t").stop()
    seen = await scrape(server.address)
    assert (
        seen.items()
        >= {
            ("leader", "0"): 1,
            ("sequences_recovered_total", "0"): 3,
            ("num_requests_waiting", "0"): 3,
            ("num_requests_live", "0"): 8,
            ("num_queued_tokens", "0"): 120,
            ("requests_accepted_total", "0"): 5,
            ("requests_refused_total", "0"): 1,
            ("sequences_ended_total", "0", "length"): 1,
            ("request_queue_time_seconds_count", "fast", "0"): 1,
            ("request_queue_time_seconds_count", "default", "0"): 0,
            ("num_requests_running", A): 3,
            ("num_requests_assigned", A): 1,
            ("num_requests_swapped", A): 2,
            ("num_kv_cache_blocks", A): 10,
            ("num_free_kv_cache_blocks", A): 8,
            ("kv_cache_usage_perc", A): pytest.approx(0.2),
            ("num_steps_total", A): 7,
            ("prompt_tokens_total", A): 30,
            ("generation_tokens_total", A): 20,
            ("forced_tokens_total", A): 3,
            ("row_steps_total", A): 11,
            ("spec_decode_num_drafts_total", A): 8,
            ("spec_decode_num_draft_tokens_per_pos_total", A, "0"): 8,
            ("spec_decode_num_draft_tokens_per_pos_total", A, "1"): 5,
            ("spec_decode_num_accepted_tokens_per_pos_total", A, "0"): 4,
            ("spec_decode_num_accepted_tokens_per_pos_total", A, "1"): 2,
            ("spec_decode_num_draft_tokens_total", A): 13,
            ("spec_decode_num_accepted_tokens_total", A): 6,
            ("prefix_cache_queries_total", A): 100,
            ("prefix_cache_hits_total", A): 48,
            ("recovered_tokens_total", A): 40,
            ("recovered_tokens_cached_total", A): 32,
            ("num_preemptions_total", A, "recompute"): 1,
            ("num_preemptions_total", A, "swap"): 2,
            ("redis_calls_total", A): 9,
            ("worker_idle_seconds_total", A): 1.5,
            ("worker_busy_seconds_total", A): 2.5,
            ("num_requests_running", B): 0,
            ("kv_cache_usage_perc", B): 0,
        }.items()
    )


async def test_tenants_are_reported_and_requests_without_keys_have_no_series(
    server: MetricsServer, engines: dict
) -> None:
    engine = engines[0] = ScriptedEngine()
    engine.stats.accept("", 7)
    engine.shares.of("")
    assert not [name for name, *_ in await scrape(server.address) if name.startswith("tenant")]
    assert engine.num_counts == 0
    engine.shares.of("t")
    for num_tokens in (10, 20):
        engine.stats.accept("t", num_tokens)
        engine.quotas.reserve(Reservation("t", num_tokens, is_resumable=False))
    engine.stats.of("t").num_output_tokens = 40
    for reason in ("LIVE_REQUESTS", "QUEUE_FULL", "LIVE_REQUESTS"):
        engine.stats.refuse("t", reason)
    engine.waiting.append(20)
    seen = {key: value for key, value in (await scrape(server.address)).items() if "t" in key[1:]}
    assert seen == {
        ("tenant_requests_accepted_total", "t", "0"): 2,
        ("tenant_requests_refused_total", "t", "0", "live_requests"): 2,
        ("tenant_requests_refused_total", "t", "0", "queue_full"): 1,
        ("tenant_prompt_tokens_total", "t", "0"): 30,
        ("tenant_generation_tokens_total", "t", "0"): 40,
        ("tenant_live_requests", "t", "0"): 2,
        ("tenant_queued_tokens", "t", "0"): 20,
    }
    assert engine.stats.num_accepted == engine.stats.num_refused == 3
    assert engine.num_counts == 1


async def test_series_of_tenants_are_made_on_the_thread_of_the_scrape(
    collector: EngineCollector, engines: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams do not wait for those of thousands of tenants."""
    engine = engines[0] = ScriptedEngine()
    engine.shares.of("t")
    engine.stats.accept("t", 1)
    engine.stats.refuse("t", "QUEUE_FULL")
    threads = set()

    def noting(family: Metric, *arguments: object) -> None:
        if family.name.startswith("quire:tenant_"):
            threads.add(threading.get_ident())
        add_metric[type(family)](family, *arguments)

    add_metric = {one: one.add_metric for one in (CounterMetricFamily, GaugeMetricFamily)}
    for one in add_metric:
        monkeypatch.setattr(one, "add_metric", noting)
    await asyncio.to_thread(lambda: list(collector.collect()))
    assert threads
    assert threading.get_ident() not in threads


async def test_each_step_is_counted_by_its_times(
    server: MetricsServer, engines: dict, steps: StepHistograms
) -> None:
    engine = engines[0] = ScriptedEngine()
    engine.add(10, FREE)
    for step_s in (0.01, 0.011, 100.0):
        steps.observe(StepTiming(10, 0.0004, 0.0002, step_s, num_scheduled_tokens=8))
    seen = await scrape(server.address)
    assert seen["step_time_seconds_count", A] == 3
    assert seen["step_time_seconds_sum", A] == pytest.approx(100.021)
    assert seen["step_time_seconds_bucket", A, "0.005"] == 0
    assert seen["step_time_seconds_bucket", A, "0.01"] == 1
    assert seen["step_time_seconds_bucket", A, "60.0"] == 2
    assert seen["step_time_seconds_bucket", A, "+Inf"] == 3
    assert seen["scheduling_time_seconds_bucket", A, "0.0005"] == 3
    assert seen["redis_time_seconds_sum", A] == pytest.approx(0.0006)
    assert seen["iteration_tokens_total_bucket", A, "8.0"] == 3
    assert seen["iteration_tokens_total_sum", A] == 24


async def test_a_lost_worker_is_no_longer_reported(
    server: MetricsServer, engines: dict, steps: StepHistograms
) -> None:
    engine = engines[0] = ScriptedEngine()
    engine.add(10, FREE)
    engine.add(11, FREE)
    steps.observe(StepTiming(10, 0.001, 0.001, 0.01, 1))
    assert {A, B} <= {label for _, *labels in await scrape(server.address) for label in labels}
    del engine.lanes[10]
    seen = {label for _, *labels in await scrape(server.address) for label in labels}
    assert B in seen
    assert A not in seen


async def test_a_scheduler_serves_what_its_lanes_have_counted(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sockets = tmp_path_factory.mktemp("s")
    worker = CheckingWorker(incarnation=10, num_blocks=32, block_size=4)
    settings = {"metrics_listen": "127.0.0.1:0"}
    async with running_stack(redis_url, sockets, {"a": worker}, **settings) as stack:
        gateway = await stack.gateway()
        for seed, principal in ((1, ""), (2, "t")):
            # The same prompt twice: 11 tokens, of which 8 are cached.
            tenant = TenantPolicy(tenant_class="fast") if principal else None
            await gateway.submit(
                list(range(11)), max_tokens=5, seed=seed, principal=principal, tenant=tenant
            )
            await gateway.wait_ended()
        [lane] = stack.engine.lanes.values()
        await until(lambda: lane.is_empty and not num_in_flight(lane), "the return of every plan")
        server = stack.scheduler.metrics_server
        assert server is not None
        seen = await scrape(server.address)
    assert seen["process_cpu_seconds_total",] > 0
    num_steps = seen["num_steps_total", A]
    # A step that only journals a request's last token has no plan.
    assert num_steps - 2 <= seen["step_time_seconds_count", A] <= num_steps
    assert (
        seen.items()
        >= {
            ("requests_accepted_total", "0"): 2,
            ("tenant_requests_accepted_total", "t", "0"): 1,
            ("tenant_prompt_tokens_total", "t", "0"): 11,
            ("tenant_generation_tokens_total", "t", "0"): 5,
            ("tenant_live_requests", "t", "0"): 0,
            ("sequences_ended_total", "0", "length"): 2,
            ("request_queue_time_seconds_count", "default", "0"): 1,
            ("request_queue_time_seconds_count", "fast", "0"): 1,
            ("num_requests_running", A): 0,
            ("num_requests_waiting", "0"): 0,
            ("num_kv_cache_blocks", A): 31,
            ("num_free_kv_cache_blocks", A): 31,
            ("prefix_cache_queries_total", A): 22,
            ("prefix_cache_hits_total", A): 8,
            ("prompt_tokens_total", A): 14,
            ("generation_tokens_total", A): 10,
            # Every token but the last one of each request is computed.
            ("iteration_tokens_total_sum", A): 22,
        }.items()
    )
    assert seen["redis_calls_total", A] >= num_steps
    assert seen["redis_time_seconds_sum", A] > 0
    assert seen["scheduling_time_seconds_sum", A] > 0
    assert seen["worker_busy_seconds_total", A] > 0


async def test_a_port_in_use_ends_the_scheduler(
    server: MetricsServer, redis_url: str, tmp_path: Path
) -> None:
    settings = SchedulerSettings(
        listen=f"unix:{tmp_path}/s.sock",
        redis_url=redis_url,
        workers="127.0.0.1:1",
        metrics_listen=server.address,
    )
    with pytest.raises(OSError, match="cannot serve metrics on"):
        await Scheduler(settings, Signals()).serve()

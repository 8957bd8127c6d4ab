"""Latencies and outcomes of requests, as the gateway's metrics report them."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from gateway_fake_scheduler import Delta, FakeScheduler, deltas
from gateway_stack import Stack
from grpc_health.v1 import health_pb2
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from gateway_svc.generation.choice import ChoiceEnd, ChoiceUpdate
from gateway_svc.metrics.objectives import parse_objectives
from gateway_svc.metrics.request_metrics import GatewayMetrics
from gateway_svc.server import Gateway
from gateway_svc.settings import GatewaySettings
from quire.service.channels import channel_options
from quire.service.errors import RequestError, failed, invalid, unavailable
from quire.v1 import inference_pb2 as pb

OBJECTIVES = parse_objectives("default=2:0.2,fast=1:0.1")


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def scrape(gateway: Gateway) -> dict[tuple[str, ...], float]:
    """Samples by name and label values."""
    server = gateway.metrics_server
    assert server is not None

    def get() -> str:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as response:
            return response.read().decode()

    text = await asyncio.to_thread(get)
    return {
        (sample.name.removeprefix("quire:"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
async def stack(settings_for: Callable[..., GatewaySettings]) -> AsyncIterator[Stack]:
    """A gateway with metrics."""
    scheduler = FakeScheduler()
    port = await scheduler.start()
    settings = settings_for(scheduler=f"127.0.0.1:{port}", metrics_listen="127.0.0.1:0")
    gateway = Gateway(settings)
    address = await gateway.start()
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stack = Stack(gateway, scheduler, port, address, channel)
        await asyncio.wait_for(stack.wait_for_status(health_pb2.HealthCheckResponse.SERVING), 10)
        yield stack
    await gateway.stop()
    await scheduler.stop()


async def test_latencies_and_outcomes_are_counted(stack: Stack) -> None:
    seen = await scrape(stack.gateway)
    assert seen["request_success_total", "stop"] == seen["request_success_total", "length"] == 0
    assert seen["process_cpu_seconds_total",] > 0
    params = pb.SamplingParams(n=2)
    call = stack.inference.StreamGenerate(
        pb.StreamGenerateRequest(text="The", sampling_params=params)
    )
    submission = await stack.scheduler.submissions.get()
    responses = aiter(call)
    stack.scheduler.accept(submission)
    await anext(responses)
    for at in (0, 1):
        entries = (Delta(submission, at, [at + 5], choice) for choice in (0, 1))
        stack.scheduler.send(deltas=deltas(*entries))
        await anext(responses)
    for choice in (0, 1):
        stack.scheduler.end(submission, 2, choice=choice)
    assert [response async for response in responses][-1].HasField("usage")
    seen = await scrape(stack.gateway)
    assert seen["time_to_first_token_seconds_count", "default"] == 1
    assert seen["inter_token_latency_seconds_count", "default"] == 2
    assert seen["e2e_request_latency_seconds_count", "default"] == 1
    assert seen["request_success_total", "length"] == 2
    assert ("request_failure_total", "cancelled") not in seen


async def test_calls_beyond_the_limit_are_counted_by_reason(stack: Stack) -> None:
    assert (await scrape(stack.gateway))["calls_refused_total", "too_many_calls"] == 0
    stack.gateway.live_limits._max_calls = 0
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.inference.Generate(pb.GenerateRequest(text="The"))
    stack.gateway.live_limits.is_stopping = True
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.inference.Generate(pb.GenerateRequest(text="The"))
    seen = await scrape(stack.gateway)
    assert seen["calls_refused_total", "too_many_calls"] == 1
    assert seen["calls_refused_total", "stopping"] == 1


async def test_failures_of_the_service_begin_with_zero(stack: Stack) -> None:
    """A rate does not see the first increase of a series that begins with it."""
    seen = await scrape(stack.gateway)
    for code in ("unavailable", "internal", "unknown", "data_loss", "deadline_exceeded"):
        assert seen["request_failure_total", code] == 0


async def test_failures_are_counted_by_code(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.inference.Generate(pb.GenerateRequest())
    failing = stack.inference.Generate(pb.GenerateRequest(text="The"))
    stack.scheduler.fail(await stack.scheduler.submissions.get(), grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(grpc.aio.AioRpcError):
        await failing
    cancelled = stack.inference.StreamGenerate(pb.StreamGenerateRequest(text="The"))
    stack.scheduler.accept(await stack.scheduler.submissions.get())
    await cancelled.read()
    cancelled.cancel()
    await until(stack.is_idle, "the end of the cancelled call")
    seen = await scrape(stack.gateway)
    for code in ("invalid_argument", "unavailable", "cancelled"):
        assert seen["request_failure_total", code] == 1
    assert seen["e2e_request_latency_seconds_count", "default"] == 0


async def test_tokens_received_together_share_their_time() -> None:
    clock = Clock()
    metrics = GatewayMetrics(OBJECTIVES, clock)
    with metrics.request("fast") as times:
        clock.now += 2

        async def updates() -> AsyncIterator[list[ChoiceUpdate]]:
            yield []
            clock.now += 1
            yield [ChoiceUpdate(0, "a", (1, 2), 0, None), ChoiceUpdate(1, "a", (1,), 0, None)]
            clock.now += 0.3
            yield [ChoiceUpdate(0, "bcd", (3, 4, 5), 2, None)]
            clock.now += 0.1
            yield [ChoiceUpdate(1, "b", (2,), 1, ChoiceEnd(0, stop_string="b"))]
            clock.now += 0.5
            yield [ChoiceUpdate(0, "", (), 5, ChoiceEnd(0))]

        async for update in updates():
            times.observe(update)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"quire:{name}", labels)

    assert value("time_to_first_token_seconds_count", tenant_class="fast") == 1
    assert value("time_to_first_token_seconds_sum", tenant_class="fast") == pytest.approx(3)
    # Three of 0.1 s for choice 0, one of 0.4 s for choice 1.
    assert value("inter_token_latency_seconds_count", tenant_class="fast") == 4
    assert value("inter_token_latency_seconds_bucket", tenant_class="fast", le="0.15") == 3
    assert value("inter_token_latency_seconds_sum", tenant_class="fast") == pytest.approx(0.7)
    assert value("e2e_request_latency_seconds_sum", tenant_class="fast") == pytest.approx(3.9)
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("request_success_total", finished_reason="length") == 1


@pytest.mark.parametrize(
    ("tenant_class", "first_s", "latencies_s", "is_met"),
    [
        ("default", 2.0, (0.2, 0.2), True),
        ("default", 2.1, (0.2, 0.2), False),
        # The mean counts.
        ("default", 0.5, (0.3, 0.1), True),
        ("default", 0.5, (0.3, 0.2), False),
        ("fast", 1.0, (0.1, 0.1), True),
        ("fast", 1.5, (0.1, 0.1), False),
        ("unnamed", 1.5, (0.2,), True),
        # One token.
        ("fast", 0.5, (), True),
    ],
)
async def test_goodput_is_what_kept_the_objectives_of_its_class(
    tenant_class: str, first_s: float, latencies_s: tuple[float, ...], is_met: bool
) -> None:
    clock = Clock()
    metrics = GatewayMetrics(OBJECTIVES, clock)
    # Sums of floats are inexact.
    slack = 1e-6

    async def updates() -> AsyncIterator[list[ChoiceUpdate]]:
        clock.now += first_s - slack
        yield [ChoiceUpdate(0, "a", (1,), 0, None), ChoiceUpdate(1, "a", (1,), 0, None)]
        for number, latency_s in enumerate(latencies_s, 1):
            clock.now += latency_s - slack
            # The second choice has ended at its first token.
            yield [ChoiceUpdate(0, "a", (1,), number, None)]

    with metrics.request(tenant_class) as times:
        async for update in updates():
            times.observe(update)
    assert goodput(metrics, tenant_class) == (1, int(is_met))


@pytest.mark.parametrize(
    ("error", "is_counted"),
    [
        (unavailable("NO_WORKER", "none"), True),
        (failed(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE", "late"), True),
        (failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full"), True),
        (RuntimeError("a fault"), True),
        # The client's doing.
        (failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOKENS_PER_MINUTE", "limit"), False),
        (failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", "slow"), False),
        (invalid("n", "N_OUT_OF_RANGE", "is 99"), False),
        (asyncio.CancelledError(), False),
    ],
    ids=lambda value: getattr(value, "message", None),
)
def test_failures_of_the_service_are_missed_objectives(
    error: BaseException, is_counted: bool
) -> None:
    metrics = GatewayMetrics(OBJECTIVES)
    with pytest.raises(type(error)), metrics.request("fast"):
        raise error
    assert goodput(metrics, "fast") == (int(is_counted), 0)


def test_a_resumed_request_counts_for_no_objective() -> None:
    metrics = GatewayMetrics(OBJECTIVES)
    with metrics.resumed_request("fast"):
        pass
    with pytest.raises(RequestError), metrics.resumed_request("fast"):
        raise unavailable("NO_WORKER", "none")
    assert goodput(metrics, "fast") == (0, 0)


def goodput(metrics: GatewayMetrics, tenant_class: str) -> tuple[float | None, float | None]:
    """Requests that count for an objective, and those of them that kept it."""
    counted, met = (
        metrics.registry.get_sample_value(f"quire:slo_requests{part}_total", labels)
        for labels in [{"tenant_class": tenant_class}]
        for part in ("", "_met")
    )
    return counted, met


async def test_a_metrics_port_in_use_fails_the_start(
    stack: Stack, settings_for: Callable[..., GatewaySettings]
) -> None:
    server = stack.gateway.metrics_server
    assert server is not None
    gateway = Gateway(settings_for(metrics_listen=server.address))
    with pytest.raises(OSError, match="cannot serve metrics on"):
        await gateway.start()
    await gateway.stop()

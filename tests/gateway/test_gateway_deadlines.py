"""What the error of an expired deadline says."""

import re

import grpc
import pytest
from gateway_stack import Stack, info_of
from grpc_health.v1 import health_pb2

from gateway_svc.rpc import deadlines
from gateway_svc.scheduler.outages import Outage, Outages
from quire.internal.v1 import scheduler_pb2
from quire.v1 import inference_pb2 as pb

REQUEST = pb.GenerateRequest(text="The")
TIMEOUT_S = 2.0


@pytest.fixture(autouse=True)
def early_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the response more than a second, for slow machines."""
    monkeypatch.setattr(deadlines, "_MARGIN_S", 1.7)
    monkeypatch.setattr(deadlines, "_MARGIN_SHARE", 0.85)


async def expired(stack: Stack) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(REQUEST, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert info_of(caught.value).reason == "DEADLINE_EXCEEDED"
    return caught.value.details()


async def test_a_request_that_ran(stack: Stack) -> None:
    error = await expired(stack)
    assert re.fullmatch(
        r"the call's deadline expired: the request was queued or ran for [0-9.]+ s", error
    )


async def test_a_request_without_a_scheduler(stack: Stack) -> None:
    stack.scheduler.leads = False
    stack.scheduler.drop_stream()
    await stack.wait_for_status(health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await expired(stack)
    assert re.search(r"the request waited [0-9.]+ s for a scheduler to lead, was queued", error)
    stack.scheduler.leads = True


async def test_a_request_without_a_worker(stack: Stack) -> None:
    hello = scheduler_pb2.SchedulerHello()
    hello.CopyFrom(stack.scheduler.hello)
    hello.ready = False
    stack.scheduler.send(hello=hello)
    await stack.wait_for_status(health_pb2.HealthCheckResponse.NOT_SERVING)
    error = await expired(stack)
    assert re.search(r"the request waited [0-9.]+ s for a worker, was queued", error)


def test_outages_are_summed_by_kind() -> None:
    now = 0.0
    outages = Outages(lambda: now)
    now = 3.0
    outages.set(Outage.WORKER)
    now = 5.0
    assert outages.seconds() == {Outage.SCHEDULER: 3.0, Outage.WORKER: 2.0}
    outages.set(None)
    now = 9.0
    outages.set(Outage.SCHEDULER)
    now = 10.0
    assert outages.seconds() == {Outage.SCHEDULER: 4.0, Outage.WORKER: 2.0}

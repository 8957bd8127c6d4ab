"""When a step's result is reported: while the next one computes, or at once if there is none."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from quire.internal.v1 import worker_pb2
from worker_svc.plan.plans import Plan, StepOutput, StepTimes, plan_from_proto
from worker_svc.runner.device_thread import DeviceThread
from worker_svc.runner.step_runner import Callback, LoadedRunner, PendingOutput, ReadyOutput, no_op
from worker_svc.service.execute_stream import ExecuteStream
from worker_svc.sim.runner import SimModel

_TIMEOUT_S = 10


class ComputingRunner:
    """Its steps compute until `may_end` is set."""

    def __init__(self) -> None:
        self.last_finished_step = 0
        self.launched: list[int] = []
        self.has_launched = threading.Event()
        self.may_end = [threading.Event() for _ in range(3)]

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        self.launched.append(plan.step)
        self.has_launched.set()
        before_blocking()
        assert self.may_end[plan.step].wait(_TIMEOUT_S)
        return ReadyOutput(StepOutput([], [], StepTimes()))

    def clear(self) -> None:
        pass


@pytest.fixture
async def given() -> AsyncIterator[tuple[ExecuteStream, ComputingRunner]]:
    thread, runner = DeviceThread(), ComputingRunner()
    yield ExecuteStream(1, thread, LoadedRunner(runner, SimModel().identity)), runner
    for event in runner.may_end:
        event.set()
    assert thread.stop(_TIMEOUT_S)


def plan(step: int) -> Plan:
    return plan_from_proto(worker_pb2.BatchPlan(epoch=1, step=step))


async def test_a_result_is_reported_while_the_next_step_computes(
    given: tuple[ExecuteStream, ComputingRunner],
) -> None:
    stream, runner = given
    stream.submit(plan(1))
    stream.submit(plan(2))
    responses = stream.responses()
    runner.may_end[1].set()
    first = await asyncio.wait_for(anext(responses), _TIMEOUT_S)
    assert first.result.step == 1
    runner.may_end[2].set()
    second = await asyncio.wait_for(anext(responses), _TIMEOUT_S)
    assert second.result.step == 2


async def test_a_plan_is_announced_when_it_arrives() -> None:
    thread, runner = DeviceThread(), ComputingRunner()
    arrived: list[int] = []
    loaded = LoadedRunner(runner, SimModel().identity, lambda plan: arrived.append(plan.step))
    stream = ExecuteStream(1, thread, loaded)
    stream.submit(plan(1))
    stream.submit(plan(2))
    # The first one still runs.
    assert arrived == [1, 2]
    for event in runner.may_end:
        event.set()
    assert thread.stop(_TIMEOUT_S)


async def test_a_result_is_reported_at_once_if_no_step_follows(
    given: tuple[ExecuteStream, ComputingRunner],
) -> None:
    stream, runner = given
    runner.may_end[1].set()
    stream.submit(plan(1))
    first = await asyncio.wait_for(anext(stream.responses()), _TIMEOUT_S)
    assert first.result.step == 1


async def test_a_discarded_step_is_not_reported(
    given: tuple[ExecuteStream, ComputingRunner],
) -> None:
    stream, runner = given
    stream.submit(plan(1))
    stream.submit(plan(2))
    assert await asyncio.to_thread(runner.has_launched.wait, _TIMEOUT_S)
    closing = asyncio.ensure_future(stream.close())
    await asyncio.sleep(0)
    runner.may_end[1].set()
    await asyncio.wait_for(closing, _TIMEOUT_S)
    assert runner.launched == [1]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream.responses()), 0.1)

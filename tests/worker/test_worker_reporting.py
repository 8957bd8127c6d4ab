"""When a step's result is told: while the next one computes, or at once if there is none."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from quire.internal.v1 import worker_pb2
from worker_svc.device_thread import DeviceThread
from worker_svc.lane import Lane
from worker_svc.plans import Plan, StepOutput, StepTimes, plan_from_proto
from worker_svc.step_runner import Finished, Launched, nothing

_PATIENCE_S = 10


class ComputingRunner:
    """Its steps compute until they are told that they may end."""

    def __init__(self) -> None:
        self.last_finished_step = 0
        self.launched: list[int] = []
        self.has_launched = threading.Event()
        self.may_end = [threading.Event() for _ in range(3)]

    def launch(self, plan: Plan, meanwhile: Callable[[], object] = nothing) -> Launched[StepOutput]:
        self.launched.append(plan.step)
        self.has_launched.set()
        meanwhile()
        assert self.may_end[plan.step].wait(_PATIENCE_S)
        return Finished(StepOutput([], [], StepTimes(0, 0, 0, 0, 0)))

    def run(self, plan: Plan) -> StepOutput:
        return self.launch(plan).output()

    def clear(self) -> None:
        pass


@pytest.fixture
async def lane() -> AsyncIterator[tuple[Lane, ComputingRunner]]:
    thread, runner = DeviceThread(), ComputingRunner()
    yield Lane(1, thread, runner), runner
    for event in runner.may_end:
        event.set()
    assert thread.stop(_PATIENCE_S)


def plan(step: int) -> Plan:
    return plan_from_proto(worker_pb2.BatchPlan(epoch=1, step=step))


async def test_a_result_is_told_while_the_next_step_computes(
    lane: tuple[Lane, ComputingRunner],
) -> None:
    told, runner = lane
    told.submit(plan(1))
    told.submit(plan(2))
    responses = told.responses()
    runner.may_end[1].set()
    first = await asyncio.wait_for(anext(responses), _PATIENCE_S)
    assert first.result.step == 1
    runner.may_end[2].set()
    second = await asyncio.wait_for(anext(responses), _PATIENCE_S)
    assert second.result.step == 2


async def test_a_result_is_told_at_once_where_no_step_follows(
    lane: tuple[Lane, ComputingRunner],
) -> None:
    told, runner = lane
    runner.may_end[1].set()
    told.submit(plan(1))
    first = await asyncio.wait_for(anext(told.responses()), _PATIENCE_S)
    assert first.result.step == 1


async def test_a_discarded_step_is_told_of_by_nobody(lane: tuple[Lane, ComputingRunner]) -> None:
    told, runner = lane
    told.submit(plan(1))
    told.submit(plan(2))
    assert await asyncio.to_thread(runner.has_launched.wait, _PATIENCE_S)
    closing = asyncio.ensure_future(told.close())
    await asyncio.sleep(0)
    runner.may_end[1].set()
    await asyncio.wait_for(closing, _PATIENCE_S)
    assert runner.launched == [1]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(told.responses()), 0.1)

"""A step of a worker of ranks on GPUs that does not end is a lost rank."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from quire.internal.v1 import worker_pb2
from worker_svc.plan.plans import Plan, StepOutput, plan_from_proto
from worker_svc.ranks.devices.pass_watch import PassWatch, WatchedRunner
from worker_svc.runner.step_runner import Callback, PendingOutput, no_op

_FEW_S = 10.0


class Step:
    """A step that is never ready."""

    def __init__(self, output: Callable[[], object]) -> None:
        self._output = output

    def is_ready(self) -> bool:
        return False

    def output(self) -> StepOutput:
        return self._output()  # type: ignore[return-value]


class Scripted:
    last_finished_step = 3

    def __init__(self, output: Callable[[], object]) -> None:
        self._output = output

    def launch(self, plan: Plan, before_blocking: Callback = no_op) -> PendingOutput[StepOutput]:
        return Step(self._output)

    def clear(self) -> None:
        pass


def _plan() -> Plan:
    return plan_from_proto(worker_pb2.BatchPlan(step=1))


def test_a_step_without_an_end_is_a_lost_rank() -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    runner = WatchedRunner(Scripted(int), PassWatch(lost.put, timeout_s=0.05, interval_s=0.01))
    # As the device thread polls it, which does not read the output of a step that is not ready.
    assert not runner.launch(_plan()).is_ready()
    assert runner.last_finished_step == 3
    assert lost.get(timeout=_FEW_S).startswith("a step has not ended for ")


def test_steps_that_end_are_forgotten() -> None:
    watch = PassWatch(no_op, interval_s=_FEW_S)
    WatchedRunner(Scripted(int), watch).launch(_plan()).output()
    assert watch._ages_s == {}
    watch.stop()


def test_steps_whose_outputs_are_not_read_are_forgotten() -> None:
    """Those behind one that failed, and those before one that was not launched."""
    watch = PassWatch(no_op, interval_s=_FEW_S)

    def fail() -> None:
        raise RuntimeError("device")

    class Refusing(Scripted):
        def launch(self, plan: Plan, before_blocking: Callback = no_op) -> Any:
            raise ValueError("plan")

    failing = WatchedRunner(Scripted(fail), watch)
    first, _ = failing.launch(_plan()), failing.launch(_plan())
    with pytest.raises(RuntimeError, match="device"):
        first.output()
    assert watch._ages_s == {}
    failing.launch(_plan())
    with pytest.raises(ValueError, match="plan"):
        WatchedRunner(Refusing(int), watch).launch(_plan())
    assert watch._ages_s == {}
    failing.launch(_plan())
    failing.clear()
    assert watch._ages_s == {}
    watch.stop()

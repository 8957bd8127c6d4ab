"""When a simulated device runs its steps."""

import time

from worker_svc.plan.plans import StepTimes
from worker_svc.sim.device_clock import DeviceClock

_STEP_NS = 2_000_000


def test_a_step_waits_for_its_plan() -> None:
    clock = DeviceClock()
    time.sleep(0.002)
    started_ns = time.monotonic_ns()
    times = clock.run(started_ns, started_ns, _STEP_NS)
    assert time.monotonic_ns() >= started_ns + _STEP_NS
    assert times.waiting_ns >= 2_000_000
    assert (times.starting_ns, times.forward_ns) == (0, _STEP_NS)
    assert times.preparing_ns > 0


def test_the_device_does_not_wait_for_a_process_that_is_late() -> None:
    clock = DeviceClock()
    first_ns = time.monotonic_ns()
    clock.run(first_ns, first_ns, _STEP_NS)
    arrived_ns = first_ns + 1
    time.sleep(0.003)
    late_ns = time.monotonic_ns()
    times = clock.run(arrived_ns, late_ns, _STEP_NS)
    # It has ended before this process began to prepare it.
    assert time.monotonic_ns() - late_ns < _STEP_NS
    assert times == StepTimes(forward_ns=_STEP_NS)


def test_a_held_device_runs_nothing_meanwhile() -> None:
    clock = DeviceClock()
    arrived_ns = time.monotonic_ns()
    time.sleep(0.003)
    clock.resume()
    resumed_ns = time.monotonic_ns()
    clock.run(arrived_ns, resumed_ns, _STEP_NS)
    assert time.monotonic_ns() >= resumed_ns + _STEP_NS - 1_000_000


def test_a_plan_without_a_time_of_arrival_comes_with_its_preparation() -> None:
    clock = DeviceClock()
    time.sleep(0.001)
    started_ns = time.monotonic_ns()
    assert clock.run(0, started_ns, 0).waiting_ns >= 1_000_000

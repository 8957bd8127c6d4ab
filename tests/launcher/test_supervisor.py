"""Ended processes are restarted unless they were drained."""

import signal
import threading

import pytest
from fake_services import FakeServices
from process_waiting import is_alive, wait_until

from quire.launcher.processes import ProcessGroup
from quire.launcher.supervisor import Supervisor


@pytest.fixture
def fake_services(tmp_path):
    return FakeServices(tmp_path)


@pytest.fixture
def group():
    group = ProcessGroup()
    yield group
    group.kill()
    group.stop(grace_s=10)


@pytest.fixture
def ends():
    return []


@pytest.fixture
def supervise(ends):
    supervisors = []

    def supervise(children):
        supervisors.append(Supervisor(children, ends.append))
        return supervisors[-1]

    yield supervise
    for supervisor in supervisors:
        supervisor.close()


def test_a_killed_process_is_restarted_and_its_end_is_reported(
    group, fake_services, supervise, ends
):
    [worker, other] = group.start(
        [fake_services.ready("worker-0"), fake_services.ready("worker-1")]
    )
    group.wait_until_ready(timeout_s=30)
    supervise(group.processes)
    first = worker.pid
    worker.kill()
    wait_until(lambda: worker.num_starts == 2, "the second start")
    assert worker.pid != first
    assert is_alive(worker.pid)
    assert other.num_starts == 1
    assert [str(end).partition(";")[0] for end in ends] == ["worker-0 ended by SIGKILL"]


def test_a_process_that_keeps_failing_is_restarted_each_time(group, fake_services, supervise, ends):
    [worker] = group.start([fake_services.failing("worker-0")])
    supervise([worker])
    wait_until(lambda: worker.num_starts == 3, "the third start")
    assert "ended with status 3" in str(ends[0])


def test_processes_are_restarted_although_their_ends_cannot_be_reported(
    group, fake_services, monkeypatch
):
    [worker] = group.start([fake_services.failing("worker-0")])
    launch, starts = worker.launch, []

    def launch_at_the_second_attempt():
        starts.append(worker.num_starts)
        if len(starts) == 1:
            raise OSError("no memory")
        launch()

    monkeypatch.setattr(worker, "launch", launch_at_the_second_attempt)

    def report(end):
        raise OSError("a closed terminal")

    supervisor = Supervisor([worker], report)
    try:
        wait_until(lambda: worker.num_starts == 3, "the third start")
    finally:
        supervisor.close()


def test_a_drained_process_is_not_restarted(group, fake_services, supervise, ends):
    [drained, worker] = group.start(
        [fake_services.ready("worker-0"), fake_services.ready("worker-1")]
    )
    group.wait_until_ready(timeout_s=30)
    supervise(group.processes)
    drained.drain(grace_s=20)
    # It is checked after the drained one.
    worker.kill()
    wait_until(lambda: worker.num_starts == 2, "the other's second start")
    assert (drained.num_starts, len(ends)) == (1, 1)
    drained.restart()
    assert is_alive(drained.pid)


def test_a_closed_supervisor_starts_nothing(group, fake_services, supervise):
    [worker] = group.start([fake_services.ready("worker-0")])
    supervise([worker]).close()
    worker.kill()
    wait_until(lambda: not worker.is_alive, "the end")
    assert worker.num_starts == 1


def test_a_supervisor_can_be_closed_in_its_own_thread(group, fake_services):
    """As by the finalizer of an object that is collected there."""
    [worker] = group.start([fake_services.failing("worker-0")])
    created, closed = threading.Event(), threading.Event()

    def close(end):
        created.wait()
        supervisor.close()
        closed.set()

    supervisor = Supervisor([worker], close)
    created.set()
    assert closed.wait(20)
    supervisor.close()
    assert worker.num_starts == 1


def test_a_process_can_be_paused_drained_and_started_again(group, fake_services):
    [worker] = group.start([fake_services.ready("worker-0")])
    group.wait_until_ready(timeout_s=30)
    worker.pause()
    wait_until(lambda: _state(worker.pid) == "T", "the pause")
    assert not worker.is_ready()
    assert worker.is_alive
    worker.resume()
    assert worker.is_ready()
    worker.pause()
    # It drains although it was paused.
    worker.terminate()
    worker.wait(timeout_s=20)
    assert worker.status == 0
    worker.restart()
    wait_until(worker.is_ready, "the worker is ready", timeout_s=30)
    worker.pause()
    worker.kill()
    worker.wait(timeout_s=20)
    assert worker.status == -signal.SIGKILL


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

"""What ends is started again, unless it was meant to end."""

import signal

import pytest
from process_waiting import is_alive, wait_until
from stand_ins import StandIns

from quire.launcher.processes import ProcessGroup
from quire.launcher.supervisor import Supervisor


@pytest.fixture
def stand_ins(tmp_path):
    return StandIns(tmp_path)


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


def test_a_process_that_is_killed_is_started_again_and_its_end_is_told(
    group, stand_ins, supervise, ends
):
    [worker, other] = group.start([stand_ins.ready("worker-0"), stand_ins.ready("worker-1")])
    group.wait_until_ready(timeout_s=30)
    supervise(group.processes)
    first = worker.pid
    worker.kill()
    wait_until(lambda: worker.num_starts == 2, "the second start")
    assert worker.pid != first
    assert is_alive(worker.pid)
    assert other.num_starts == 1
    assert [str(end).partition(";")[0] for end in ends] == ["worker-0 ended by SIGKILL"]


def test_one_that_ends_by_itself_comes_back_every_time_later(group, stand_ins, supervise, ends):
    [worker] = group.start([stand_ins.failing("worker-0")])
    supervise([worker])
    wait_until(lambda: worker.num_starts == 3, "the third start")
    assert "ended with status 3" in str(ends[0])


def test_one_that_is_retired_stays_away(group, stand_ins, supervise, ends):
    [leaver, worker] = group.start([stand_ins.ready("worker-0"), stand_ins.ready("worker-1")])
    group.wait_until_ready(timeout_s=30)
    supervise(group.processes)
    leaver.retire(grace_s=20)
    # The one behind it was looked at later.
    worker.kill()
    wait_until(lambda: worker.num_starts == 2, "the other's second start")
    assert (leaver.num_starts, len(ends)) == (1, 1)
    leaver.restart()
    assert is_alive(leaver.pid)


def test_a_closed_supervisor_starts_nothing(group, stand_ins, supervise):
    [worker] = group.start([stand_ins.ready("worker-0")])
    supervise([worker]).close()
    worker.kill()
    wait_until(lambda: not worker.is_alive, "the end")
    assert worker.num_starts == 1


def test_a_process_can_be_paused_drained_and_started_again(group, stand_ins):
    [worker] = group.start([stand_ins.ready("worker-0")])
    group.wait_until_ready(timeout_s=30)
    worker.pause()
    wait_until(lambda: _state(worker.pid) == "T", "the pause")
    assert not worker.is_ready()
    assert worker.is_alive
    worker.resume()
    assert worker.is_ready()
    worker.pause()
    # Drains although it was paused.
    worker.terminate()
    worker.wait(timeout_s=20)
    assert worker.status == 0
    worker.restart()
    worker.wait_until_ready(timeout_s=30)
    worker.pause()
    worker.kill()
    worker.wait(timeout_s=20)
    assert worker.status == -signal.SIGKILL


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

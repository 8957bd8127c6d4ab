import os
import signal
import subprocess
import sys
import threading

import pytest
from process_waiting import is_alive, wait_until
from stand_ins import StandIns

from quire.launcher.errors import LaunchError
from quire.launcher.processes import ProcessGroup


@pytest.fixture
def stand_ins(tmp_path):
    return StandIns(tmp_path)


@pytest.fixture
def group():
    group = ProcessGroup()
    yield group
    group.kill()
    group.stop(grace_s=10)


def test_tiers_become_ready_and_stop_in_the_order_of_their_start(group, stand_ins):
    [gateway] = group.start([stand_ins.ready("gateway")])
    group.start([stand_ins.ready("scheduler")])
    group.start([stand_ins.ready("worker-0"), stand_ins.ready("worker-1")])
    group.wait_until_ready(timeout_s=30)
    assert gateway.is_ready()
    assert len(set(group.pids)) == 4
    group.stop(grace_s=20)
    assert stand_ins.stopped[:2] == ["gateway", "scheduler"]
    assert set(stand_ins.stopped[2:]) == {"worker-0", "worker-1"}
    assert not any(is_alive(pid) for pid in group.pids)


def test_a_service_that_ends_at_its_start_is_named_with_status_and_log(group, stand_ins):
    group.start([stand_ins.never_ready("gateway")])
    group.start([stand_ins.failing("worker-0")])
    with pytest.raises(LaunchError) as caught:
        group.wait_until_ready(timeout_s=30)
    message = str(caught.value)
    assert message.startswith("worker-0 ended with status 3; its log ends:\n    line 10\n")
    assert message.endswith("line 29")


def test_a_service_that_is_killed_is_named_with_the_signal(group, stand_ins):
    [worker] = group.start([stand_ins.never_ready("worker-0")])
    worker.kill()
    wait_until(lambda: not is_alive(worker.pid), "the worker's end")
    with pytest.raises(LaunchError, match="worker-0 ended by SIGKILL"):
        group.check()


def test_a_service_that_is_never_ready_is_named_with_its_log(group, stand_ins):
    [worker] = group.start([stand_ins.never_ready("worker-0")])
    wait_until(lambda: "weights" in stand_ins.directory.joinpath("worker-0.log").read_text(), "log")
    with pytest.raises(LaunchError, match=r"worker-0 is not ready after 0\.1 s; .*\n.*weights"):
        group.wait_until_ready(timeout_s=0.1)
    assert is_alive(worker.pid)


def test_a_service_that_lives_on_without_a_model_is_named(group, stand_ins):
    group.start([stand_ins.never_ready("gateway")])
    group.start([stand_ins.without_model("worker-0")])
    with pytest.raises(LaunchError, match="worker-0 cannot load the model"):
        group.wait_until_ready(timeout_s=30)


def test_a_check_may_fail_for_a_while_and_is_told_meanwhile(group, stand_ins, monkeypatch):
    monkeypatch.setattr("quire.launcher.processes._SILENT_S", 0.0)
    group.start([stand_ins.whose_check_fails("worker-0", patience_s=0.5)])
    said: list[str] = []
    with pytest.raises(LaunchError, match="worker-0 cannot load the model"):
        group.wait_until_ready(timeout_s=30, on_wait=said.append)
    # Once, for it did not change.
    assert said == ["worker-0 to load the model"]


def test_a_service_that_does_not_drain_is_killed(group, stand_ins):
    [worker] = group.start([stand_ins.stubborn("worker-0")])
    wait_until(lambda: worker.address is not None, "the worker's start")
    group.stop(grace_s=0.1)
    assert not is_alive(worker.pid)


def test_a_service_is_not_reached_by_the_signals_of_the_terminal(group, stand_ins):
    [worker] = group.start([stand_ins.ready("worker-0")])
    assert os.getpgid(worker.pid) != os.getpgid(os.getpid())


def test_children_die_with_a_parent_that_is_killed(tmp_path):
    script = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from stand_ins import StandIns
from quire.launcher.processes import ProcessGroup
group = ProcessGroup()
group.start([StandIns(Path(sys.argv[2])).stubborn("worker-0")])
print(*group.pids, flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", script, os.path.dirname(__file__), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until((tmp_path / "worker-0.address").exists, "the child's start")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(pid), "the child's end")


def test_children_of_the_spawner_outlive_the_thread_that_asked_for_them(group, stand_ins, spawner):
    def start() -> None:
        spawner.call(lambda: group.start([stand_ins.ready("worker-0")]))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    group.wait_until_ready(timeout_s=30)
    group.check()

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from fake_services import FakeServices
from process_waiting import is_alive, wait_until

from quire.launcher.errors import LaunchError
from quire.launcher.processes import ProcessGroup
from quire.service.progress_file import Progress, write_progress


@pytest.fixture
def fake_services(tmp_path):
    return FakeServices(tmp_path)


@pytest.fixture
def group():
    group = ProcessGroup()
    yield group
    group.kill()
    group.stop(grace_s=10)


def test_tiers_become_ready_and_stop_in_the_order_of_their_start(group, fake_services):
    [gateway] = group.start([fake_services.ready("gateway")])
    group.start([fake_services.ready("scheduler")])
    group.start([fake_services.ready("worker-0"), fake_services.ready("worker-1")])
    group.wait_until_ready(timeout_s=30)
    assert gateway.is_ready()
    assert len(set(group.pids)) == 4
    group.stop(grace_s=20)
    assert fake_services.stopped[:2] == ["gateway", "scheduler"]
    assert set(fake_services.stopped[2:]) == {"worker-0", "worker-1"}
    assert not any(is_alive(pid) for pid in group.pids)


def test_a_service_that_ends_at_its_start_is_named_with_status_and_log(group, fake_services):
    group.start([fake_services.never_ready("gateway")])
    group.start([fake_services.failing("worker-0")])
    with pytest.raises(LaunchError) as caught:
        group.wait_until_ready(timeout_s=30)
    message = str(caught.value)
    assert message.startswith("worker-0 ended with status 3; the end of its log:\n    line 10\n")
    assert message.endswith("line 29")


def test_a_service_that_is_killed_is_named_with_the_signal(group, fake_services):
    [worker] = group.start([fake_services.never_ready("worker-0")])
    worker.kill()
    wait_until(lambda: not is_alive(worker.pid), "the worker's end")
    with pytest.raises(LaunchError, match="worker-0 ended by SIGKILL"):
        group.check()


def test_a_service_that_is_never_ready_is_named_with_its_log(group, fake_services):
    [worker] = group.start([fake_services.never_ready("worker-0")])
    wait_until(
        lambda: "weights" in fake_services.directory.joinpath("worker-0.log").read_text(), "log"
    )
    with pytest.raises(LaunchError, match=r"worker-0 is not ready after 0\.1 s; .*\n.*weights"):
        group.wait_until_ready(timeout_s=0.1)
    assert is_alive(worker.pid)


def test_a_running_service_without_a_model_is_named(group, fake_services):
    group.start([fake_services.never_ready("gateway")])
    group.start([fake_services.without_model("worker-0")])
    with pytest.raises(LaunchError, match="worker-0 cannot load the model"):
        group.wait_until_ready(timeout_s=30)


def test_a_check_may_fail_for_a_while_and_is_reported_meanwhile(group, fake_services, monkeypatch):
    monkeypatch.setattr("quire.launcher.processes._SILENT_S", 0.0)
    group.start([fake_services.with_failing_check("worker-0", timeout_s=0.5)])
    reported: list[str] = []
    with pytest.raises(LaunchError, match="worker-0 cannot load the model"):
        group.wait_until_ready(timeout_s=30, on_wait=reported.append)
    # Once, because it did not change.
    assert reported == ["worker-0 to load the model"]


def test_the_reported_progress_of_a_start_is_shown(group, fake_services, monkeypatch):
    monkeypatch.setattr("quire.launcher.processes._SILENT_S", 0.0)
    file = fake_services.directory / "worker-0.progress"
    file.write_text("of an earlier start")
    spec = fake_services.with_failing_check("worker-0", timeout_s=30)
    group.start([replace(spec, progress_file=file)])
    in_detail: list[str] = []
    reported: list[str] = []

    def follow(actions: str) -> None:
        in_detail.append(actions)
        if len(in_detail) == 1:
            write_progress(file, Progress("downloading"))
        elif len(in_detail) == 2:
            write_progress(file, Progress("downloading", "1 MiB of 2 MiB"))
        else:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.wait_until_ready(timeout_s=30, on_wait=reported.append, on_progress=follow)
    action = "worker-0 to load the model"
    assert in_detail == [
        action,
        f"{action} (downloading)",
        f"{action} (downloading, 1 MiB of 2 MiB)",
    ]
    # Without the detail, so that a log has one line per action.
    assert reported == [action, f"{action} (downloading)"]


def test_a_service_that_does_not_drain_is_killed(group, fake_services):
    [worker] = group.start([fake_services.ignoring_sigterm("worker-0")])
    wait_until(lambda: worker.address is not None, "the worker's start")
    group.stop(grace_s=0.1)
    assert not is_alive(worker.pid)


def test_a_service_does_not_receive_signals_of_the_terminal(group, fake_services):
    [worker] = group.start([fake_services.ready("worker-0")])
    assert os.getpgid(worker.pid) != os.getpgid(os.getpid())


def test_children_are_killed_with_their_parent(tmp_path):
    script = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fake_services import FakeServices
from quire.launcher.processes import ProcessGroup
group = ProcessGroup()
group.start([FakeServices(Path(sys.argv[2])).ignoring_sigterm("worker-0")])
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


def test_children_of_the_spawner_outlive_the_calling_thread(group, fake_services, spawner):
    def start() -> None:
        spawner.call(lambda: group.start([fake_services.ready("worker-0")]))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    group.wait_until_ready(timeout_s=30)
    group.check()

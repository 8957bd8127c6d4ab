import os
import signal
import subprocess
import sys

import pytest

from quire.launcher.directory import PrivateDirectory

_OWNER = """
import time
from quire.launcher.directory import PrivateDirectory
private = PrivateDirectory.make()
(private.path / "redis.log").touch()
print(private.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def base(tmp_path_factory, monkeypatch):
    path = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def test_only_this_user_has_access(base):
    private = PrivateDirectory.make()
    assert list(base.iterdir()) == [private.path]
    assert private.path.stat().st_mode & 0o777 == 0o700
    private.remove()
    assert list(base.iterdir()) == []


def test_making_a_directory_removes_only_those_of_ended_processes(base):
    command = [sys.executable, "-c", _OWNER]
    environment = {**os.environ, "TMPDIR": str(base)}
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    left = owner.stdout.readline().strip()
    (base / "quire-notes").mkdir()
    (base / "quire-stack-file").touch()
    (base / "quire-stack-link").symlink_to(base / "quire-notes")
    others = {"quire-notes", "quire-stack-file", "quire-stack-link"}

    living = PrivateDirectory.make()
    assert os.path.exists(left)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    last = PrivateDirectory.make()
    assert {path.name for path in base.iterdir()} == {living.path.name, last.path.name, *others}

    living.remove()
    last.remove()
    assert {path.name for path in base.iterdir()} == others


def test_another_users_directory_is_kept(base, monkeypatch):
    (base / "quire-stack-theirs").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    PrivateDirectory.make().remove()
    assert [path.name for path in base.iterdir()] == ["quire-stack-theirs"]

"""Workers that load on one GPU wait for each other."""

import asyncio
import fcntl
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs
from worker_driver import worker_settings

from worker_svc.gpu import gpu_lock
from worker_svc.gpu.gpu_lock import exclusive_lock
from worker_svc.loading import runner_loading
from worker_svc.settings import WorkerSettings

_OTHER = """
import sys
from pathlib import Path
from worker_svc.gpu.gpu_lock import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("locked", flush=True)
"""


async def test_one_waits_until_the_other_has_left(tmp_path: Path) -> None:
    path = tmp_path / "any"
    with exclusive_lock(path):
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _OTHER, str(path), stdout=asyncio.subprocess.PIPE
        )
        assert other.stdout is not None
        # Its log line comes when it has found the file locked.
        assert b"waiting for another worker" in await other.stdout.readline()
    assert await other.stdout.readline() == b"locked\n"
    assert await other.wait() == 0


def test_any_user_may_lock_the_file(tmp_path: Path) -> None:
    path = tmp_path / "any"
    for _ in range(2):
        with exclusive_lock(path), capture_logs() as logs:
            assert path.stat().st_mode & 0o777 == 0o666
        assert not logs


def test_without_a_lock_file_a_worker_continues(tmp_path: Path) -> None:
    with capture_logs() as logs, exclusive_lock(tmp_path / "none" / "any"):
        pass
    assert [log["log_level"] for log in logs] == ["warning"]


@pytest.mark.parametrize("is_set", [False, True])
def test_a_worker_has_its_gpu_for_itself_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    held: list[str] = []

    def load(settings: WorkerSettings, device: torch.device) -> None:
        for path in tmp_path.iterdir():
            with path.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(path.name)

    monkeypatch.setattr(runner_loading, "find_device", lambda setting: torch.device("cuda"))
    monkeypatch.setattr(runner_loading, "_load", load)
    monkeypatch.setattr(gpu_lock, "gettempdir", lambda: str(tmp_path))
    gpu = SimpleNamespace(uuid="9f0c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    folder = tmp_path if is_set else None
    if is_set:
        monkeypatch.setattr(gpu_lock, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    runner_loading.load_runner(worker_settings(tmp_path, gpu_locks=folder))
    assert held == ["quire-gpu-9f0c.lock"]

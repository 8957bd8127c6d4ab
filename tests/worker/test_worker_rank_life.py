"""The ranks of a worker live and die together."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from rank_threads import rank_threads
from tiny_models import llama, save_model
from torch.distributed import HashStore
from worker_driver import worker_settings
from worker_processes import logged, worker_process

from benchmarks.chaos.ranks import followers_of
from worker_svc.errors import WrongSettingError
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model.checkpoint import ModelError
from worker_svc.ranks import following, heartbeats
from worker_svc.ranks.agreement import MODEL, wait_for_all
from worker_svc.ranks.leader import Leader
from worker_svc.ranks.messages import Kind, Messages
from worker_svc.ranks.requirements import require_ranks
from worker_svc.ranks.start import LeadingRanks

_RANK_LOST = 3
_TWO = "--tensor-parallel-size=2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@dataclass
class Ranks:
    """A worker of two ranks that is ready."""

    worker: asyncio.subprocess.Process
    follower: int  # its process id


def flags_of(model: Path, folder: Path, *ranks: str) -> tuple[str, ...]:
    listen = f"--listen=unix:{folder}/worker.sock"
    return (listen, f"--model={model}", "--num-blocks=50", *(ranks or (_TWO,)))


@asynccontextmanager
async def two_ranks(model: Path, folder: Path, *ranks: str) -> AsyncIterator[Ranks]:
    async with worker_process(*flags_of(model, folder, *ranks)) as process:
        ready = json.loads(await logged(process, "rank ready"))
        assert ready["rank"] == 1
        await logged(process, '"ready"')
        yield Ranks(process, ready["process"])


def is_running(process: int) -> bool:
    """Whether there is such a process, and not only its status."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def ended(process: int) -> None:
    while is_running(process):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def test_a_model_that_cannot_be_loaded_ends_the_ranks(tmp_path: Path) -> None:
    settings = worker_settings(tmp_path / "no-model", tensor_parallel_size=2)
    with pytest.raises(ModelError, match="no such folder"):
        load_runner(settings)
    threads = [thread.name for thread in threading.enumerate()]
    assert "rank-1" not in threads


@pytest.mark.slow
async def test_stops_with_the_worker(model: Path, tmp_path: Path) -> None:
    async with two_ranks(model, tmp_path) as ranks:
        ranks.worker.send_signal(signal.SIGTERM)
        assert await ranks.worker.wait() == 0
        await ended(ranks.follower)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "was silent")]
)
async def test_a_lost_rank_is_a_lost_worker(
    model: Path, tmp_path: Path, number: signal.Signals, words: str
) -> None:
    async with two_ranks(model, tmp_path) as ranks:
        os.kill(ranks.follower, number)
        assert words in await logged(ranks.worker, "a rank is lost")
        assert await ranks.worker.wait() == _RANK_LOST
        await ended(ranks.follower)


def test_notices_a_rank_that_is_silent_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host, where its end is not seen. One that has not started yet is waited for."""
    monkeypatch.setattr(heartbeats, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(heartbeats, "LOADING_SILENCE_S", 0.1)
    store, lost = HashStore(), SimpleQueue[str]()
    monitor = heartbeats.HeartbeatMonitor(store, 3, lost.put)
    monitor.start()
    store.set("heartbeat/2", "1")
    assert "rank 2 was silent" in lost.get(timeout=10)
    monitor.stop()


@pytest.mark.parametrize(("is_child", "has_loaded"), [(True, False), (True, True), (False, False)])
def test_a_child_that_cannot_load_waits_until_rank_0_has_read_why(
    is_child: bool, has_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may load for minutes. It kills its children."""
    monkeypatch.setattr(following, "_REPORTED_S", 0.01)
    with rank_threads(2) as ranks:
        first, second = ranks.groups
        if has_loaded:
            second.exchange_own(MODEL, {})
        report = threading.Thread(
            target=following._report,
            args=(second, ModelError("no such file")),
            kwargs={"is_loading_child": is_child},
            daemon=True,
        )
        report.start()
        with pytest.raises(ModelError, match="rank 1: no such file"):
            wait_for_all(first)
        report.join(0.3 if is_child and not has_loaded else 10)
        assert report.is_alive() == (is_child and not has_loaded)


def test_watches_the_others_until_they_have_received_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is silent while rank 0 closes is noticed. Messages to stages wait for them."""
    monkeypatch.setattr(heartbeats, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(heartbeats, "SILENCE_S", 0.1)
    store, lost = HashStore(), SimpleQueue[str]()
    monitor = heartbeats.HeartbeatMonitor(store, 2, lost.put)
    with rank_threads(2, num_stages=2) as threads:
        first, second = threads.groups
        ranks = LeadingRanks(first, Leader(first), store, monitor, None)
        monitor.start()
        ranks.watch()
        closing = threading.Thread(target=ranks.close, daemon=True)
        closing.start()
        store.set("heartbeat/1", "1")
        assert "rank 1 was silent" in lost.get(timeout=10)
        assert closing.is_alive()
        assert Messages(second.broadcast).receive().kind == Kind.STOP
        closing.join(10)
        assert not closing.is_alive()


@pytest.mark.slow
async def test_a_rank_lost_while_loading_is_a_lost_worker(model: Path, tmp_path: Path) -> None:
    async with worker_process(*flags_of(model, tmp_path)) as process:
        await logged(process, '"loading"')
        [follower] = followers_of(process.pid)
        os.kill(follower, signal.SIGKILL)
        assert await process.wait() == _RANK_LOST


@pytest.mark.slow
async def test_layers_that_are_not_the_models_stop_the_start(model: Path, tmp_path: Path) -> None:
    flags = flags_of(model, tmp_path, "--pipeline-parallel-size=2", "--pipeline-layers=1,1")
    async with worker_process(*flags) as process:
        assert await process.wait() == 2
        assert process.stderr is not None
        assert b"1,1 is 2 layers, but the model has 3" in await process.stderr.read()


@pytest.mark.slow
async def test_ends_when_the_worker_is_killed(model: Path, tmp_path: Path) -> None:
    async with two_ranks(model, tmp_path) as ranks:
        ranks.worker.kill()
        await ended(ranks.follower)


def variables(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """As torchrun sets them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.mark.slow
async def test_joins_the_ranks_of_torchrun(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, flags = free_port(), flags_of(model, tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name, value in variables(1, port).items():
        monkeypatch.setenv(name, value)
    async with worker_process(*flags) as follower:
        monkeypatch.setenv("RANK", "0")
        async with worker_process(*flags) as worker:
            await logged(worker, '"ready"')
            # torchrun sends it to all of them.
            for process in (follower, worker):
                process.send_signal(signal.SIGTERM)
            assert await asyncio.gather(worker.wait(), follower.wait()) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_refuses_the_ranks_of_another_number(
    rank: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(rank, free_port(), size=3).items():
        monkeypatch.setenv(name, value)
    async with worker_process(*flags_of(model, tmp_path)) as process:
        assert await process.wait() == 2
        assert process.stderr is not None
        said = await process.stderr.read()
        assert b"quire-worker: WORLD_SIZE is 3, but" in said
        assert b"Traceback" not in said


def test_settings_that_cannot_work_are_refused() -> None:
    settings = worker_settings(Path("model"), tensor_parallel_size=2, enable_torch_compile=True)
    with pytest.raises(WrongSettingError, match="--enable-torch-compile does not support"):
        require_ranks(settings, torch.device("cpu"))


async def test_a_simulated_worker_has_no_ranks(model: Path, tmp_path: Path) -> None:
    async with worker_process(*flags_of(model, tmp_path), "--engine=sim") as process:
        assert await process.wait() == 2
        assert process.stderr is not None
        assert b"a simulated worker has no ranks" in await process.stderr.read()

"""The worker as a process: what it says when it can and cannot serve, and how it leaves."""

import asyncio
import signal
import sys
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tiny_models import llama, save_model
from worker_driver import LaneClient
from worker_processes import health_of, logged, worker_process

from quire.internal.v1 import worker_pb2_grpc
from worker_svc.service.process import refuse_foreign_kernels

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@pytest.mark.slow
async def test_serves_drains_and_stops(model: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/worker.sock"
    flags = (f"--listen={address}", f"--model={model}", "--kv-cache-memory=1MiB")
    async with worker_process(*flags) as process, grpc.aio.insecure_channel(address) as channel:
        sizing = await logged(process, "key-value cache")
        assert '"block_bytes": 6144' in sizing
        assert f'"num_blocks": {2**20 // 6144}' in sizing
        await logged(process, '"ready"')
        assert await health_of(channel, "ready") == _SERVING
        lane = LaneClient(worker_pb2_grpc.WorkerServiceStub(channel))
        hello = await lane.open()
        assert (hello.num_blocks, hello.max_model_len) == (2**20 // 6144, 96)
        process.send_signal(signal.SIGTERM)
        response = await lane.call.read()
        while not response.heartbeat.draining:
            response = await lane.call.read()
        assert await health_of(channel, "ready") == _NOT_SERVING
        await lane.call.done_writing()
        assert await process.wait() == 0


@pytest.mark.slow
async def test_stays_up_and_reports_the_reason_without_a_model(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/worker.sock"
    flags = (f"--listen={address}", "--model=/no/such/model")
    async with worker_process(*flags) as process, grpc.aio.insecure_channel(address) as channel:
        assert "/no/such/model: no such folder" in await logged(process, "model not loaded")
        assert await health_of(channel, "") == _SERVING
        assert await health_of(channel, "ready") == _NOT_SERVING
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--kv-cache-memory=lots", ("--kv-cache-memory", "lots")),
        # Each starts a process that imports torch.
        *(
            pytest.param(flag, words, marks=pytest.mark.slow)
            for flag, words in (
                # 96 tokens are 6 blocks of 16; the null block is not to be used.
                ("--num-blocks=6", ("96 tokens", "6 blocks", "only 5")),
                ("--max-model-len=97", ("97", "96")),
                ("--block-size=0", ("--block-size", "0")),
                ("--swap-space=5KiB", ("--swap-space", "5 KiB", "6 KiB")),
            )
        ),
    ],
)
async def test_wrong_settings_stop_it(
    model: Path, tmp_path: Path, flag: str, words: tuple[str, ...]
) -> None:
    flags = (f"--listen=unix:{tmp_path}/worker.sock", f"--model={model}", flag)
    async with worker_process(*flags) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 2
        message = stderr.decode().splitlines()[-1]
        assert all(word in message for word in words)


def test_refuses_the_distribution_called_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_foreign_kernels()
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.2")
    with pytest.raises(SystemExit, match=r"'kernels' 0\.18\.2"):
        refuse_foreign_kernels()


async def test_an_interrupt_ends_it_without_a_traceback_while_it_imports_the_model() -> None:
    code = (
        "import sys, time; from worker_svc import __main__ as worker; "
        "worker._loader = lambda _: (print('importing', flush=True), time.sleep(60)); "
        "sys.argv = ['quire-worker', '--engine=sim']; worker.main()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (-signal.SIGINT, b"")

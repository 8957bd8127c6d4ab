"""Starts and stops HTTP servers of other engines."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from benchmarks.engines.host import EngineError, log_end
from benchmarks.engines.systems import vllm_environment
from benchmarks.engines.workload import MAX_MODEL_LEN, MAX_NUM_SEQS
from quire.launcher.child import start_with_death_signal

_READY_S = 300.0
_STOP_S = 20.0
_POLL_S = 0.2


@contextmanager
def vllm_server(python: str, model: Path, folder: Path) -> Iterator[str]:
    """Run vLLM's OpenAI server and yield its URL, as `http_server` does."""
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "bench", "--dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--enforce-eager", "--disable-uvicorn-access-log"),
    ]
    with http_server(command, folder / "vllm-server.log", vllm_environment()) as url:
        yield url


@contextmanager
def http_server(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a server on a free port and yield its URL once it is healthy. It takes `--host` and
    `--port`, and has `/health`. EngineError if it does not start."""
    port = _free_port()
    log.unlink(missing_ok=True)
    address = ("--host", "127.0.0.1", "--port", str(port))
    process = start_with_death_signal(
        [*command, *address], log, {**os.environ, **(environment or {})}
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _READY_S
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise EngineError(f"the server does not start; {log_end(log)}")
        time.sleep(_POLL_S)


def _is_healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=1.0, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

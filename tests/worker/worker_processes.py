"""Workers as processes of their own."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


@asynccontextmanager
async def worker_process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker_svc", "--log-format=json", "--device=cpu", *flags,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def logged(process: asyncio.subprocess.Process, words: str) -> str:
    """The first record on stderr that holds `words`; all before it are records of the worker."""
    assert process.stderr is not None
    async for line in process.stderr:
        assert json.loads(line)["service"] == "worker"
        if words in line.decode():
            return line.decode()
    raise AssertionError(f"the process ended without a word of {words!r}")


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


@asynccontextmanager
async def sim_process(
    folder: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel]]:
    """A simulated worker that is ready, and a channel to it."""
    address = f"unix:{folder}/worker.sock"
    small = ("--engine=sim", "--block-size=4", "--num-blocks=200", "--max-model-len=96")
    async with (
        worker_process(f"--listen={address}", *small, *flags) as process,
        grpc.aio.insecure_channel(address) as channel,
    ):
        await logged(process, '"ready"')
        yield process, channel

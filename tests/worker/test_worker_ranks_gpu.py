"""A worker with a rank on each of several GPUs of this host, with NCCL between them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest
import torch
from tiny_models import Reference, llama, save_model
from worker_driver import BLOCK_SIZE, Driver, LaneClient, Sequence
from worker_processes import worker_process

from benchmarks.chaos.ranks import followers_of
from quire.internal.v1 import worker_pb2_grpc

_NUM_TOKENS: Final = 24
_PROMPTS: Final = ([5, 17, 99], [3], [42, 8, 150, 61, 7, 7, 23, 11, 2])
# The model has four heads.
_NUM_RANKS: Final = 4 if torch.cuda.device_count() >= 4 else 2
_RANK_LOST: Final = 3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"ranks need two GPUs or more, torch finds {torch.cuda.device_count()}",
    ),
    # The ranks wait for other tests' workers on their GPUs, and compile kernels.
    pytest.mark.timeout(400),
]


@asynccontextmanager
async def ranks_on_gpus(
    model: Path, folder: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, LaneClient]]:
    """A worker, in a process of its own because the loss of a rank ends it, and a lane to it."""
    address = f"unix:{folder}/worker.sock"
    sizes = (f"--block-size={BLOCK_SIZE}", "--num-blocks=200", "--max-num-seqs=40")
    ranks = ("--device=cuda", "--dtype=float32", f"--tensor-parallel-size={_NUM_RANKS}")
    async with (
        worker_process(f"--listen={address}", f"--model={model}", *sizes, *ranks, *flags) as worker,
        grpc.aio.insecure_channel(address) as channel,
    ):
        await ready(worker)
        lane = LaneClient(worker_pb2_grpc.WorkerServiceStub(channel))
        await lane.open()
        yield worker, lane


async def ready(worker: asyncio.subprocess.Process) -> None:
    """Libraries may write lines that are no records."""
    assert worker.stderr is not None
    lines = []
    async for line in worker.stderr:
        lines.append(line.decode())
        if b'"ready"' in line:
            return
    raise AssertionError("the worker has ended: " + "".join(lines[-20:]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("flags", [("--enforce-eager",), ()], ids=["eager", "graphs"])
async def test_equals_generate(flags: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    reference = Reference(model)
    async with ranks_on_gpus(model, tmp_path, *flags) as (worker, lane):
        sequences = [
            Sequence(row=row, tokens=list(prompt), num_prompt_tokens=len(prompt))
            for row, prompt in enumerate(_PROMPTS)
        ]
        await Driver(lane).run(sequences, _NUM_TOKENS)
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == 0
    for sequence, prompt in zip(sequences, _PROMPTS, strict=True):
        assert sequence.tokens[len(prompt) :] == reference.generate(prompt, _NUM_TOKENS)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_is_a_lost_worker(
    number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    async with ranks_on_gpus(model, tmp_path, "--enforce-eager") as (worker, _):
        *_, last = followers_of(worker.pid)
        os.kill(last, number)
        assert await worker.wait() == _RANK_LOST

"""Which shard's stream a worker serves: fencing by shard and epoch, moves, streams that race."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from structlog.testing import capture_logs
from tiny_models import llama, save_model
from waiting import until
from worker_driver import LaneClient, ServedWorker, served_model

from quire.internal.v1 import worker_pb2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def worker(model: Path) -> AsyncIterator[ServedWorker]:
    async with served_model(model) as worker:
        yield worker


async def opened(worker: ServedWorker, epoch: int, shard: int) -> LaneClient:
    lane = LaneClient(worker.stub, epoch=epoch, shard=shard)
    await lane.open()
    return lane


async def refusal(worker: ServedWorker, epoch: int, shard: int) -> str:
    """The reason why a stream is not opened."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await opened(worker, epoch, shard)
    return reason_of(refused.value)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The status and the reason of a refusal."""
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return f"{error.code().name} {info.reason}"


async def close(worker: ServedWorker, lane: LaneClient) -> None:
    await lane.call.done_writing()
    assert await lane.ended() == grpc.StatusCode.OK
    await until(worker.servicer._idle.is_set, "a worker without a stream")


async def runs(lane: LaneClient) -> bool:
    """Whether the stream takes a plan."""
    return (await lane.run(worker_pb2.BatchPlan())).step == lane.step


async def test_a_stream_of_another_shard_is_refused_while_one_is_open(worker) -> None:
    lane = await opened(worker, epoch=7, shard=1)
    for epoch in (6, 7, 8):
        assert await refusal(worker, epoch, shard=2) == "UNAVAILABLE OTHER_SHARD"
    assert await runs(lane)
    # The refused epochs were those of another shard: they fence nothing.
    assert await runs(await opened(worker, epoch=8, shard=1))
    assert await lane.ended() == grpc.StatusCode.ABORTED


async def test_a_refusal_is_logged_once_until_something_changes(worker) -> None:
    def refused() -> list[int]:
        return [line["shard"] for line in logs if line["event"] == "stream ended"]

    with capture_logs() as logs:
        lane = await opened(worker, epoch=7, shard=1)
        for shard in (2, 2, 3, 2, 3):
            await refusal(worker, epoch=6, shard=shard)
        assert refused() == [2, 3]
        # Another reason, and another lane.
        await refusal(worker, epoch=6, shard=1)
        await refusal(worker, epoch=6, shard=1)
        assert refused() == [2, 3, 1]
        await close(worker, lane)
        await opened(worker, epoch=8, shard=2)
        await refusal(worker, epoch=8, shard=3)
        assert refused()[-1] == 3
        assert len(refused()) == 4


async def test_another_shard_gets_a_worker_without_a_stream_whatever_its_epoch(worker) -> None:
    await close(worker, await opened(worker, epoch=7, shard=1))
    lane = await opened(worker, epoch=3, shard=2)
    assert await runs(lane)
    assert await refusal(worker, epoch=9, shard=1) == "UNAVAILABLE OTHER_SHARD"


async def test_epochs_of_a_shard_fence_also_after_another_one_had_the_worker(worker) -> None:
    await close(worker, await opened(worker, epoch=7, shard=1))
    assert await refusal(worker, epoch=6, shard=1) == "FAILED_PRECONDITION STALE_EPOCH"
    await close(worker, await opened(worker, epoch=3, shard=2))
    assert await refusal(worker, epoch=6, shard=1) == "FAILED_PRECONDITION STALE_EPOCH"
    assert await refusal(worker, epoch=2, shard=2) == "FAILED_PRECONDITION STALE_EPOCH"
    other = LaneClient(worker.stub, epoch=7, holder=b"other", shard=1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await other.open()
    assert reason_of(refused.value) == "FAILED_PRECONDITION FOREIGN_EPOCH"
    assert await runs(await opened(worker, epoch=7, shard=1))


async def test_a_shard_that_gets_a_worker_back_finds_another_incarnation(worker) -> None:
    """Its blocks were overwritten meanwhile: the pool that the shard kept must not be used."""
    seen = []
    for shard in (1, 1, 2, 1):
        lane = LaneClient(worker.stub, epoch=5, shard=shard)
        seen.append((await lane.open()).incarnation)
        await close(worker, lane)
        identified = await worker.stub.Identify(worker_pb2.IdentifyRequest())
        assert identified.incarnation == seen[-1]
    assert seen[0] == seen[1]
    assert len({*seen}) == 3


async def test_of_two_shards_that_open_at_once_one_gets_the_worker(worker: ServedWorker) -> None:
    before = await opened(worker, epoch=9, shard=0)
    release = threading.Event()
    worker.thread.submit(release.wait)
    before.call.cancel()
    await until(worker.servicer._idle.is_set, "a worker without a stream")
    # Both pass the first check, and wait for what the device is doing.
    lanes = [LaneClient(worker.stub, epoch=10 - shard, shard=shard) for shard in (1, 2)]
    opening = [asyncio.create_task(lane.open()) for lane in lanes]
    await until(lambda: {1, 2} <= worker.servicer._fences.keys(), "two streams that wait")
    release.set()
    await asyncio.wait(opening)
    refused = [task for task in opening if task.exception() is not None]
    assert len(refused) == 1
    error = refused[0].exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert reason_of(error) == "UNAVAILABLE OTHER_SHARD"
    first = opening.index(*[task for task in opening if task not in refused])
    assert await runs(lanes[first])
    # The other one retries.
    await close(worker, lanes[first])
    again = lanes[1 - first]
    assert await runs(await opened(worker, again.epoch, shard=2 - first))

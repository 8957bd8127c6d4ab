"""A stream to a worker, and who waits for it."""

import asyncio

import grpc
import pytest

from scheduler_svc.lanes.stream import LaneLost, WorkerStream


async def reach() -> None:
    async with WorkerStream.connected("unix:/nowhere.sock"):
        await asyncio.Event().wait()


async def test_a_worker_that_cannot_be_reached_is_lost(monkeypatch):
    monkeypatch.setattr("scheduler_svc.lanes.stream.OPEN_TIMEOUT_S", 0.01)
    with pytest.raises(LaneLost, match="cannot be reached"):
        await reach()


async def test_whoever_is_cancelled_just_as_a_worker_is_reached_opens_no_lane(monkeypatch):
    async def reached(channel: grpc.aio.Channel) -> None:
        reaching.cancel()

    async with grpc.aio.insecure_channel("unix:/nowhere.sock") as channel:
        monkeypatch.setattr(type(channel), "channel_ready", reached)
    reaching = asyncio.create_task(reach())
    done, _ = await asyncio.wait({reaching}, timeout=5)
    # A task that has lost its cancellation would go on for ever, and hold up the leadership's end.
    assert done
    assert reaching.cancelled()

"""Connecting a stream to a worker."""

import asyncio

import grpc
import pytest

from scheduler_svc.lane.worker_stream import LaneLost, WorkerStream


async def reach() -> None:
    async with WorkerStream.connected("unix:/nowhere.sock"):
        await asyncio.Event().wait()


async def test_a_worker_that_cannot_be_reached_is_lost(monkeypatch):
    monkeypatch.setattr("scheduler_svc.lane.worker_stream.OPEN_TIMEOUT_S", 0.01)
    with pytest.raises(LaneLost, match="cannot be reached"):
        await reach()


async def test_a_cancellation_at_the_moment_of_the_connection_opens_no_lane(monkeypatch):
    async def reached(channel: grpc.aio.Channel) -> None:
        reaching.cancel()

    async with grpc.aio.insecure_channel("unix:/nowhere.sock") as channel:
        monkeypatch.setattr(type(channel), "channel_ready", reached)
    reaching = asyncio.create_task(reach())
    done, _ = await asyncio.wait({reaching}, timeout=5)
    # A task that loses its cancellation would never end, and block the end of the term.
    assert done
    assert reaching.cancelled()

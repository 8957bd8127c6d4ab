"""Connecting a stream to a worker."""

import asyncio
import math
import ssl
from types import SimpleNamespace

import grpc
import pytest
from certificates import make_certificates

from quire.internal.v1 import worker_pb2
from quire.service.tls import TLS
from scheduler_svc.lane import worker_stream
from scheduler_svc.lane.worker_stream import LaneLost, WorkerSilent, WorkerStream


async def reach(
    address: str = "unix:/nowhere.sock", tls: TLS | None = None, host: str | None = None
) -> None:
    async with WorkerStream.connected(address, tls, host):
        await asyncio.Event().wait()


async def test_a_worker_that_cannot_be_reached_is_lost_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr("scheduler_svc.lane.worker_stream.OPEN_TIMEOUT_S", 0.01)
    with pytest.raises(LaneLost, match=r"cannot be reached: .*No such file"):
        await reach()
    folder = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "worker.pem", folder / "worker-key.pem")
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", ssl=context)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(LaneLost, match=r"cannot be reached: .*not valid for 'elsewhere'"):
            await reach(address, TLS(folder / "ca.pem"), "elsewhere")
        with pytest.raises(LaneLost, match=r"cannot be reached: .*certificate verify failed"):
            await reach(address, TLS(), "worker")
        # A file that is being replaced: the next attempt may find it.
        tls = TLS(folder / "ca.pem")
        (folder / "ca.pem").unlink()
        with pytest.raises(LaneLost, match=r"cannot be reached: .*ca.pem cannot be read"):
            await reach(address, tls, "worker")


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


class Clock:
    """The time of a stream's watch, whose worker sends a heartbeat every second. It passes only
    while the watch sleeps. A heartbeat that arrives while the process is stopped is read after."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, stopped: tuple[float, float], phase_s: float = 0.0
    ) -> None:
        """`stopped`: when the process is stopped, and for how long. `phase_s`: from a wake-up of
        the watch to a heartbeat."""
        self.now_s = 1000.0
        self.last_heartbeat_s = self.ends_at_s = math.inf
        self.is_over = asyncio.Event()
        self.stream: WorkerStream | None = None
        self._stopped_at, self._stopped_for_s = stopped
        self._next_heartbeat_s = self.now_s + phase_s
        clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
        monkeypatch.setattr(worker_stream, "time", clock)
        monkeypatch.setattr(worker_stream, "sleep_ticks", self._sleep)

    async def _sleep(self, interval_s: float) -> None:
        await asyncio.sleep(0)
        # What has arrived is read before the next timer.
        self._read()
        end_s = self.now_s + max(interval_s, 1e-6)
        while self._next_heartbeat_s < min(end_s, self._stopped_at):
            self.now_s = self._next_heartbeat_s
            self._read()
        self.now_s = end_s
        if end_s >= self.ends_at_s:
            self.is_over.set()
        if end_s >= self._stopped_at:
            self.now_s = max(end_s, self._stopped_at + self._stopped_for_s)
            self._stopped_at = math.inf

    def _read(self) -> None:
        assert self.stream is not None
        while self._next_heartbeat_s <= self.now_s:
            message = worker_pb2.ExecuteResponse(heartbeat=worker_pb2.Heartbeat())
            self.stream._receive(message.SerializeToString())
            self._next_heartbeat_s += 1.0
            if self._next_heartbeat_s > self.last_heartbeat_s:
                self._next_heartbeat_s = math.inf


async def watched(clock: Clock, step_timeout_s: float, until_s: float) -> WorkerStream:
    """A stream that was watched until it was lost, or until then."""
    async with grpc.aio.insecure_channel("unix:/nowhere.sock") as channel:
        clock.ends_at_s = until_s
        clock.stream = stream = WorkerStream(channel, "unix:/nowhere.sock", None, None)
        watching = asyncio.create_task(stream.watch(lambda: None, step_timeout_s, lambda: None))
        over = asyncio.create_task(clock.is_over.wait())
        await asyncio.wait({watching, over}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, over):
            task.cancel()
        return stream


@pytest.mark.parametrize("stopped_s", [0.5, 1.0, 1.5, 1.8, 2.1, 2.4, 2.6, 3.0, 5.0])
async def test_the_scheduler_s_own_stop_is_not_the_worker_s_silence(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float
) -> None:
    for tenth in range(10):
        for phase in range(10):
            clock = Clock(monkeypatch, (1005.01 + tenth / 10, stopped_s), phase / 10 + 0.05)
            stream = await watched(clock, 60, until_s=1020)
            assert stream.lost is None, f"{tenth=} {phase=}: {stream.lost}"


@pytest.mark.parametrize("step_timeout_s", [0.2, 60, 1e6])
async def test_a_silent_worker_is_lost_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, step_timeout_s: float
) -> None:
    clock = Clock(monkeypatch, (math.inf, 0))
    clock.last_heartbeat_s = 1005.0
    stream = await watched(clock, step_timeout_s, until_s=1030)
    assert isinstance(stream.lost, WorkerSilent)
    assert clock.now_s == pytest.approx(1008, abs=0.01)

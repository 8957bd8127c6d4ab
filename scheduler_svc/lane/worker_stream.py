"""The `Execute` stream to one worker: sends plans, receives results and heartbeats."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Self

import grpc

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.http2.call import StreamCall
from quire.service.http2.call_status import CallEnded
from quire.service.http2.connect import authority, connect, find_obstacle
from quire.service.protocol_version import PROTOCOL_VERSION
from quire.service.tls import TLS, TLSError, open_aio_channel
from scheduler_svc.ticks import sleep_ticks

_EXECUTE = "/quire.internal.v1.WorkerService/Execute"
OPEN_TIMEOUT_S = 5.0
# At most; with a shorter step timeout a quarter of it.
WATCH_INTERVAL_S = 1.0
# Workers send a heartbeat every second.
SILENCE_S = 3.0


class LaneLost(Exception):
    """The worker's stream has ended; the message is the reason."""


class WorkerSilent(LaneLost):
    """The worker sent nothing for too long: it may be dead, stopped or cut off."""


class LaneTaken(LaneLost):
    """A later leader has opened a lane to the worker."""


class OpeningRefused(LaneLost):
    """The worker has a leader with a higher epoch, or another version of the protocol."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The fields of a worker's hello, under the same names."""

    incarnation: int
    protocol_version: int
    model_fingerprint: bytes
    block_size: int
    num_blocks: int
    num_host_blocks: int
    kv_cache_dtype: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    last_finished_step: int
    draining: bool
    num_speculative_tokens: int
    num_stages: int = 1


def _ignore() -> None:
    """What a stream calls before it is started."""


class WorkerStream:
    """One `Execute` call. It has a connection of its own: a step's messages through grpc.aio would
    cost as much as all else that the lane does for a small step."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, tls: TLS | None, host: str | None
    ) -> None:
        """The channel to the address, for other calls."""
        # Why the stream has ended; None while it has not.
        self.lost: LaneLost | None = None
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._address, self._tls, self._host = address, tls, host
        self._call: StreamCall | None = None
        self._hello: asyncio.Future[worker_pb2.Hello] = asyncio.Future()
        self._results: deque[worker_pb2.StepResult] = deque()
        self._on_draining: Callable[[], None] = _ignore
        self._on_change: Callable[[], None] = _ignore
        self._last_message_at = time.monotonic()

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, address: str, tls: TLS | None, host: str | None
    ) -> AsyncIterator[Self]:
        """Connect to a worker; close the stream at the end. With TLS its certificate has the
        host. LaneLost if it cannot be reached."""
        options = channel_options(INTERNAL_MESSAGE_BYTES)
        try:
            opened = open_aio_channel(address, options, tls, host)
        except TLSError as error:
            # Files that are being replaced; the next attempt reads them again.
            raise LaneLost(f"{address} cannot be reached: {error}") from error
        async with opened as channel:
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await channel.channel_ready()
            except TimeoutError:
                why = await find_obstacle(address, tls, host) or "no response in time"
                raise LaneLost(f"{address} cannot be reached: {why}") from None
            stream = cls(channel, address, tls, host)
            try:
                yield stream
            finally:
                stream._close()

    async def identify(self) -> int:
        """The worker's incarnation, at once. LaneLost without a response."""
        request = worker_pb2.IdentifyRequest()
        try:
            return (await self._stub.Identify(request, timeout=OPEN_TIMEOUT_S)).incarnation
        except grpc.aio.AioRpcError as error:
            raise LaneLost(_why(error)) from error

    async def open(self, epoch: int, holder: bytes, shard: int = 0) -> WorkerInfo:
        """Open the lane under a shard's leadership and return the worker's hello, which it sends
        after its running step. LaneLost without a hello; OpeningRefused if it may not be opened by
        this leader."""
        opening = worker_pb2.OpenLane(
            epoch=epoch,
            holder=holder,
            protocol_version=PROTOCOL_VERSION,
            shard=shard,
        )
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                self._call = await connect(self._make_call, self._address, self._tls, self._host)
                self._call.send(worker_pb2.ExecuteRequest(open=opening).SerializeToString())
                hello = await self._hello
        except TimeoutError:
            raise LaneLost(f"no hello within {OPEN_TIMEOUT_S:g} s") from None
        except (CallEnded, OSError, TLSError) as error:
            is_refused = (
                isinstance(error, CallEnded) and error.code is grpc.StatusCode.FAILED_PRECONDITION
            )
            kind = OpeningRefused if is_refused else LaneLost
            raise kind(f"no hello: {error}") from error
        return WorkerInfo(**{x.name: getattr(hello, x.name) for x in fields(WorkerInfo)})

    def _make_call(self) -> StreamCall:
        return StreamCall(
            _EXECUTE, authority(self._address), INTERNAL_MESSAGE_BYTES, self._receive, self._ended
        )

    def start(self, on_draining: Callable[[], None], on_change: Callable[[], None]) -> None:
        """From now on `on_change` is called for each result and when the stream is lost."""
        self._last_message_at = time.monotonic()
        self._on_draining, self._on_change = on_draining, on_change
        if self.lost:
            on_change()

    def results(self) -> Iterator[worker_pb2.StepResult]:
        """Take the results received since the last call, in the order of the plans."""
        while self._results:
            yield self._results.popleft()

    @property
    def next_result(self) -> worker_pb2.StepResult | None:
        """The oldest result that was not taken yet."""
        return self._results[0] if self._results else None

    def take_result(self) -> None:
        """Take the oldest result."""
        self._results.popleft()

    def send(self, request: worker_pb2.ExecuteRequest) -> None:
        """Send a request with a plan, at once. LaneLost if the stream has ended."""
        assert self._call is not None
        try:
            self._call.send(request.SerializeToString())
        except CallEnded as error:
            raise LaneLost(str(error)) from error

    async def watch(
        self,
        oldest_sent_at: Callable[[], float | None],
        step_timeout_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        """Detect a worker that is stopped, cut off or stuck, whose stream does not break: mark it
        lost when it is silent for too long or has a plan for longer than `step_timeout_s`, and
        call `on_lost`. `oldest_sent_at`: the time.perf_counter at which the oldest plan without a
        result was sent; None without one."""
        longest_s = min(WATCH_INTERVAL_S, step_timeout_s / 4)
        while self.lost is None:
            before = time.monotonic()
            interval_s = min(longest_s, self._last_message_at + SILENCE_S - before)
            await sleep_ticks(interval_s)
            now = time.monotonic()
            silent_s = now - self._last_message_at
            if now - before > interval_s + SILENCE_S / 4:
                # This process itself was stopped, and has not read. The last message may have been
                # a second old before the interval: a shorter stop does not make a silence of it.
                self._last_message_at = now
            elif silent_s > SILENCE_S:
                self._mark_lost(WorkerSilent(f"it was silent for {silent_s:.1f} s"))
            elif (sent_at := oldest_sent_at()) and time.perf_counter() - sent_at > step_timeout_s:
                self._mark_lost(LaneLost(f"it has not finished a step in {step_timeout_s:g} s"))
        on_lost()

    def _mark_lost(self, why: LaneLost) -> None:
        """Give the stream up; the first reason is kept."""
        self.lost = self.lost or why

    def _close(self) -> None:
        self._on_draining = self._on_change = _ignore
        if self._call is not None:
            self._call.cancel()
        self._hello.cancel()

    def _receive(self, message: bytes) -> None:
        self._last_message_at = time.monotonic()
        response = worker_pb2.ExecuteResponse.FromString(message)
        if response.HasField("result"):
            self._results.append(response.result)
            self._on_change()
        elif response.HasField("heartbeat"):
            if response.heartbeat.draining:
                self._on_draining()
        elif not self._hello.done():
            self._hello.set_result(response.hello)

    def _ended(self, why: CallEnded) -> None:
        if self._hello.done():
            kind = LaneTaken if why.code is grpc.StatusCode.ABORTED else LaneLost
            self._mark_lost(kind(f"the worker ended the stream: {why}"))
            self._on_change()
        else:
            self._hello.set_exception(why)
            # Read once, since the attempt may have been given up before.
            self._hello.exception()


def _why(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"

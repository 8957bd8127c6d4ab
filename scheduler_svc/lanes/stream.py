"""One `Execute` stream: plans down, results and heartbeats up."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import grpc

from quire.internal.v1 import worker_pb2, worker_pb2_grpc
from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.protocol import PROTOCOL_VERSION

_Call = grpc.aio.StreamStreamCall[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]

OPEN_TIMEOUT_S = 5.0


class LaneLost(Exception):
    """The worker's stream is gone; says why."""


class WorkerSilent(LaneLost):
    """Nothing was heard of the worker for too long: it may live, stopped or cut off."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker said of itself."""

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


class WorkerStream:
    """An `Execute` call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        # Why the stream has ended, if it has.
        self.lost: LaneLost | None = None
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._call: _Call = self._stub.Execute()
        self._results: deque[worker_pb2.StepResult] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._heard_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the worker was last heard of."""
        return time.monotonic() - self._heard_at

    def listen_anew(self) -> None:
        """Counts silence from now on: this process itself did not listen."""
        self._heard_at = time.monotonic()

    def lose(self, why: LaneLost) -> None:
        """Gives the stream up."""
        self.lost = self.lost or why

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str) -> AsyncIterator[Self]:
        """A stream to a worker that can be reached, closed at the end. LaneLost if it cannot."""
        options = channel_options(INTERNAL_MESSAGE_BYTES)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await channel.channel_ready()
            except TimeoutError:
                raise LaneLost(f"{address} cannot be reached") from None
            stream = cls(channel)
            try:
                yield stream
            finally:
                await stream._close()

    async def identify(self) -> int:
        """The worker's incarnation, at once. LaneLost without an answer."""
        request = worker_pb2.IdentifyRequest()
        try:
            return (await self._stub.Identify(request, timeout=OPEN_TIMEOUT_S)).incarnation
        except grpc.aio.AioRpcError as error:
            raise LaneLost(_why(error)) from error

    async def open(self, epoch: int, holder: bytes) -> Worker:
        """Says who leads, and takes the worker, when the step that it runs is over; what the worker
        is. LaneLost without a hello."""
        opening = worker_pb2.OpenLane(
            epoch=epoch,
            holder=holder,
            protocol_version=PROTOCOL_VERSION,
        )
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._call.write(worker_pb2.ExecuteRequest(open=opening))
                first = await self._call.read()
                if not isinstance(first, worker_pb2.ExecuteResponse) or not first.HasField("hello"):
                    code, details = await self._call.code(), await self._call.details()
                    raise LaneLost(f"no hello: {code.name}: {details}")
        except TimeoutError:
            raise LaneLost(f"no hello within {OPEN_TIMEOUT_S:g} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LaneLost(_why(error)) from error
        return _worker(first.hello)

    def start(self, on_draining: Callable[[], None], on_news: Callable[[], None]) -> None:
        """Reads the stream from here on; `on_news`: there is a result, or the stream is lost."""
        self.listen_anew()
        self._reader = asyncio.create_task(self._read(on_draining, on_news))

    def results(self) -> Iterator[worker_pb2.StepResult]:
        """Those that have come since, in the order of the plans."""
        while self._results:
            yield self._results.popleft()

    async def send(self, plan: worker_pb2.BatchPlan) -> None:
        try:
            await self._call.write(worker_pb2.ExecuteRequest(plan=plan))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LaneLost(_why(error)) from error

    async def _close(self) -> None:
        self._call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, on_draining: Callable[[], None], on_news: Callable[[], None]) -> None:
        try:
            # read(), not iteration: the two do not mix on one call, and the hello was read.
            while isinstance(response := await self._call.read(), worker_pb2.ExecuteResponse):
                self._heard_at = time.monotonic()
                if response.HasField("result"):
                    self._results.append(response.result)
                    on_news()
                elif response.HasField("heartbeat") and response.heartbeat.draining:
                    on_draining()
            code, details = await self._call.code(), await self._call.details()
            self.lose(LaneLost(f"the worker ended the stream: {code.name} {details}"))
        except grpc.aio.AioRpcError as error:
            self.lose(LaneLost(_why(error)))
        on_news()


def _why(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _worker(hello: worker_pb2.Hello) -> Worker:
    return Worker(
        incarnation=hello.incarnation,
        protocol_version=hello.protocol_version,
        model_fingerprint=hello.model_fingerprint,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        num_host_blocks=hello.num_host_blocks,
        kv_cache_dtype=hello.kv_cache_dtype,
        max_num_seqs=hello.max_num_seqs,
        max_model_len=hello.max_model_len,
        max_num_batched_tokens=hello.max_num_batched_tokens,
        last_finished_step=hello.last_finished_step,
        draining=hello.draining,
    )

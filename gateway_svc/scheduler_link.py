"""The gateway's connection to the scheduler: connect, greet, read, connect again."""

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable

import grpc
import structlog

from gateway_svc.multiplexer import Multiplexer
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.errors import RequestError, unavailable
from quire.service.protocol import PROTOCOL_VERSION

log = structlog.get_logger()

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0


class SchedulerLink:
    """Keeps one `Connect` stream up. `requests` is what goes over it.

    `report` hears why no request would run, or None when one would.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        max_queued_tokens: int,
        report: Callable[[str | None], object],
    ) -> None:
        self.requests = Multiplexer(max_queued_tokens, _away())
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._report = report
        self._gateway_id = secrets.token_bytes(16)
        # The highest seen, on any stream.
        self._epoch = 0
        self._hello: scheduler_pb2.SchedulerHello | None = None

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence any worker takes; None while that is unknown."""
        if self._hello is None or not self._hello.HasField("max_model_len"):
            return None
        return self._hello.max_model_len

    async def run(self) -> None:
        """Stays connected until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        task = asyncio.current_task()
        assert task is not None
        while True:
            why = await self._connect()
            if task.cancelling():
                # gRPC swallows a cancellation that comes together with the end of the call.
                return
            if self._hello is not None:
                backoff_s = _FIRST_BACKOFF_S
            self._hello = None
            # Why is for the operator: it may speak of another client's request.
            self.requests.close(_away())
            log.warning("scheduler away", reason=why, retry_in_s=backoff_s)
            self._report(why)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1))
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _connect(self) -> str:
        """One stream's life; returns why it ended."""
        call = self._stub.Connect()
        writer = asyncio.create_task(self._write(call))
        try:
            async for frame in call:
                if frame.epoch >= self._epoch:
                    self._epoch = frame.epoch
                    self._receive(frame)
                elif self._hello is None:
                    return f"its epoch {frame.epoch} is over, {self._epoch} has been seen"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except _RefusedError as error:
            return str(error)
        finally:
            writer.cancel()
            call.cancel()
        return "it ended the stream"

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        hello = scheduler_pb2.GatewayHello(
            gateway_id=self._gateway_id, protocol_version=PROTOCOL_VERSION
        )
        # A write that fails ends the stream, which the reader sees.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(scheduler_pb2.ConnectRequest(hello=hello))
            while True:
                await call.write(await self.requests.outbox.take())

    def _receive(self, frame: scheduler_pb2.ConnectResponse) -> None:
        if frame.HasField("hello"):
            self._greeted(frame.hello)
        self.requests.deliver(frame)

    def _greeted(self, hello: scheduler_pb2.SchedulerHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise _RefusedError(
                f"it speaks protocol {hello.protocol_version}, this is {PROTOCOL_VERSION}"
            )
        if self._hello is None:
            log.info("scheduler connected", epoch=self._epoch, ready=hello.ready)
        self._hello = hello
        self.requests.open()
        self._report(None if hello.ready else "no worker is attached to the scheduler")


class _RefusedError(Exception):
    """A scheduler that must not be spoken to."""


def _away() -> RequestError:
    return unavailable("SCHEDULER_AWAY", "the scheduler is away")

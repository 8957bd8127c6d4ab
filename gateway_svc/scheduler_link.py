"""The gateway's connection to the scheduler that leads: find it, follow it, find the next one."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import grpc
import structlog

from gateway_svc.addresses import Addresses
from gateway_svc.leader_search import Leader, LeaderSearch, NotLeadingError, connect
from gateway_svc.multiplexer import Multiplexer
from gateway_svc.outbox import Outbox
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import unavailable
from quire.service.protocol import PROTOCOL_VERSION

log = structlog.get_logger()

# A stream that ends sooner is followed by a pause, which grows from one such to the next.
_SHORT_LIFE_S = 1.0
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0


class SchedulerLink:
    """Keeps one `Connect` stream up, to whichever scheduler leads. `requests` is what goes over it.

    `report` hears why no request would run, or None when one would.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        requests: Multiplexer,
        wait_s: float,
        report: Callable[[str | None], object],
    ) -> None:
        """`wait_s` is how long somebody waits for a first scheduler."""
        self.requests = requests
        # The longest sequence that workers take, as it was last heard; None until it was.
        self.max_model_len: int | None = None
        self._search = LeaderSearch(Addresses(addresses), self._try)
        self._wait_s = wait_s
        self._report = report
        # The highest seen, on any stream.
        self._epoch = 0
        self._was_greeted = asyncio.Event()
        self._is_closing = False
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Stays connected until closed."""
        self._running = asyncio.create_task(self._run())

    async def close(self, within_s: float) -> None:
        """Says what is left to say, and ends."""
        self._is_closing = True
        self.requests.outbox.close()
        if self._running is not None:
            # Without a scheduler there is nobody to say it to.
            if not self.requests.is_open:
                self._running.cancel()
            await asyncio.wait({self._running}, timeout=within_s)
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def greeted(self) -> None:
        """Until a scheduler has ever been there: what it says bounds requests. RequestError if
        that takes too long.
        """
        if self._was_greeted.is_set():
            return
        try:
            async with asyncio.timeout(self._wait_s):
                await self._was_greeted.wait()
        except TimeoutError:
            raise unavailable("SCHEDULER_AWAY", "the scheduler is away") from None

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._report("no scheduler has been found yet")
        backoff_s = _FIRST_BACKOFF_S
        while not self._is_closing:
            leader = await self._search.find()
            began_s = time.monotonic()
            try:
                why = await self._follow(leader)
            finally:
                self.requests.lose()
                leader.call.cancel()
                await leader.channel.close()
            if self._is_closing or task.cancelling():
                # gRPC swallows a cancellation that comes together with the end of the call.
                return
            # Why is for the operator: it may speak of another client's request.
            log.warning("scheduler away", address=leader.address, reason=why)
            self._report(why)
            if time.monotonic() - began_s > _SHORT_LIFE_S:
                backoff_s = _FIRST_BACKOFF_S
            else:
                # It greets, and hangs up on what it hears.
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _try(self, address: str) -> Leader:
        hello = scheduler_pb2.GatewayHello(protocol_version=PROTOCOL_VERSION)
        leader = await connect(address, hello)
        try:
            self._check(leader.greeting)
        except NotLeadingError as error:
            await leader.channel.close()
            self._report(str(error))
            raise
        return leader

    async def _follow(self, leader: Leader) -> str:
        """One stream's life; returns why it ended."""
        frame: object = leader.greeting
        self.requests.open()
        writer = asyncio.create_task(_write(leader, self.requests.outbox))
        log.info("scheduler connected", address=leader.address, epoch=leader.greeting.epoch)
        try:
            while isinstance(frame, scheduler_pb2.ConnectResponse):
                self._check(frame)
                self._receive(frame)
                frame = await leader.call.read()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except NotLeadingError as error:
            return str(error)
        except Exception as error:
            # Whatever a frame is, the link is there for all requests.
            log.exception("a frame of the scheduler failed")
            return f"its frame failed: {error!r}"
        finally:
            writer.cancel()
        return "it ended the stream"

    def _check(self, frame: scheduler_pb2.ConnectResponse) -> None:
        if frame.epoch < self._epoch:
            raise NotLeadingError(f"its epoch {frame.epoch} is over, {self._epoch} has been seen")
        if frame.HasField("hello") and frame.hello.protocol_version != PROTOCOL_VERSION:
            version = frame.hello.protocol_version
            raise NotLeadingError(f"it speaks protocol {version}, this is {PROTOCOL_VERSION}")

    def _receive(self, frame: scheduler_pb2.ConnectResponse) -> None:
        self._epoch = frame.epoch
        if frame.HasField("hello"):
            hello = frame.hello
            if hello.HasField("max_model_len"):
                self.max_model_len = hello.max_model_len
            self._was_greeted.set()
            self._report(None if hello.ready else "no worker is attached to the scheduler")
        self.requests.deliver(frame)


async def _write(leader: Leader, outbox: Outbox) -> None:
    # A write that fails ends the stream, which the reader sees.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (frame := await outbox.take()) is not None:
            await leader.call.write(frame)
        await leader.call.done_writing()

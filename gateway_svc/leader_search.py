"""Finds the scheduler that leads, among those that may."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import structlog

from gateway_svc.addresses import Addresses
from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.channels import link_options

log = structlog.get_logger()

# A scheduler that leads greets at once; one that is stopped or cut off never does.
HELLO_WITHIN_S = 1.0
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 0.5
_LOOK_S = 0.1


class NotLeadingError(Exception):
    """Why a scheduler is not followed: it does not lead, or cannot be reached or understood."""


@dataclass(frozen=True)
class Leader:
    """A stream to a scheduler that has greeted."""

    address: str
    channel: grpc.aio.Channel
    call: "grpc.aio.StreamStreamCall[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]"
    greeting: scheduler_pb2.ConnectResponse


async def connect(address: str, hello: scheduler_pb2.GatewayHello) -> Leader:
    """NotLeadingError if no greeting comes in time."""
    channel = grpc.aio.insecure_channel(address, options=link_options())
    try:
        async with asyncio.timeout(HELLO_WITHIN_S):
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect()
            greeting = await _greeted(call, hello)
    except BaseException as error:
        await channel.close()
        if isinstance(error, grpc.aio.AioRpcError):
            raise NotLeadingError(f"{error.code().name}: {error.details()}") from error
        if isinstance(error, TimeoutError):
            raise NotLeadingError(f"no greeting within {HELLO_WITHIN_S} s") from error
        raise
    return Leader(address, channel, call, greeting)


async def _greeted(
    call: "grpc.aio.StreamStreamCall[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]",
    hello: scheduler_pb2.GatewayHello,
) -> scheduler_pb2.ConnectResponse:
    # Where it has ended already the read says how.
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(scheduler_pb2.ConnectRequest(hello=hello))
    frame = await call.read()
    if not isinstance(frame, scheduler_pb2.ConnectResponse) or not frame.HasField("hello"):
        raise NotLeadingError("it did not greet")
    return frame


class LeaderSearch:
    """Tries every address at once, each again and again: those that hang hold nobody up."""

    def __init__(self, addresses: Addresses, try_: Callable[[str], Awaitable[Leader]]) -> None:
        """`try_` connects to an address; NotLeadingError if nobody leads there."""
        self._addresses = addresses
        self._try = try_

    async def find(self) -> Leader:
        """The first that answers as a leader."""
        found: asyncio.Future[Leader] = asyncio.get_running_loop().create_future()
        tries: dict[str, asyncio.Task[None]] = {}
        looking = asyncio.create_task(self._addresses.look_up())
        try:
            while not found.done():
                for address in self._addresses.known - tries.keys():
                    tries[address] = asyncio.create_task(self._keep_trying(address, found))
                await asyncio.wait({found}, timeout=_LOOK_S)
            return found.result()
        finally:
            for task in (looking, *tries.values()):
                task.cancel()
            await asyncio.gather(looking, *tries.values(), return_exceptions=True)

    async def _keep_trying(self, address: str, found: asyncio.Future[Leader]) -> None:
        backoff_s = _FIRST_BACKOFF_S
        said = ""
        task = asyncio.current_task()
        assert task is not None
        # gRPC swallows a cancellation that comes together with the end of a call.
        while not (found.done() or task.cancelling()):
            try:
                leader = await self._try(address)
            except NotLeadingError as error:
                # Said once, not at every try.
                if str(error) != said:
                    said = str(error)
                    log.info("not the leader", address=address, reason=said)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1))
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            else:
                if found.done():
                    await leader.channel.close()
                else:
                    found.set_result(leader)

"""`SchedulerService`: one stream per gateway and shard."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import structlog
from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.errors import RequestError, abort, failed, unavailable
from scheduler_svc.gateway.connection import GatewayConnection
from scheduler_svc.gateway.frame_handler import FrameHandler

log = structlog.get_logger()

_Context = grpc.aio.ServicerContext[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]
_Frames = AsyncIterator[scheduler_pb2.ConnectRequest]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Passes frames between streams and the handlers of their shards. A stream for a shard that
    this scheduler does not lead is refused, with the leader's address."""

    def __init__(
        self,
        handler_of: Callable[[int], Awaitable[FrameHandler | None]],
        leader_address: Callable[[int], str],
        num_shards: Callable[[], int],
    ) -> None:
        """`handler_of` returns None for a shard that this process does not lead; it may wait while
        this process is about to lead it. `leader_address` returns an empty string while the leader
        of a shard is unknown; `num_shards` 0 while the number is unknown."""
        self._handler_of = handler_of
        self._leader_address = leader_address
        self._num_shards = num_shards

    async def Connect(  # type: ignore[override]  # noqa: N802
        self, request_iterator: _Frames, context: _Context
    ) -> None:
        """Serve one stream."""
        first = await anext(request_iterator, None)
        if first is None:
            return
        shard = first.hello.shard
        handler = await self._handler_of(shard)
        try:
            if handler is None:
                raise standby_error(self._leader_address(shard), self._num_shards())
            connection = handler.connect()
        except RequestError as error:
            await abort(context, error)
        reader = asyncio.create_task(_read(first, request_iterator, handler, connection))
        try:
            async for frame in connection.frames():
                await context.write(frame)
        except RequestError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            log.info("gateway disconnected", shard=shard)
            raise
        finally:
            reader.cancel()
            handler.disconnect(connection)


def standby_error(leader_address: str, num_shards: int = 0) -> RequestError:
    """The error of a scheduler that does not lead the shard. It names what is known: a gateway that
    is started while the shard has no leader finds the other shards by their number."""
    metadata = {"leader": leader_address} if leader_address else {}
    if num_shards:
        metadata["num_shards"] = str(num_shards)
    return unavailable("STANDBY", "this scheduler does not lead", metadata=metadata)


async def _read(
    first: scheduler_pb2.ConnectRequest,
    frames: _Frames,
    handler: FrameHandler,
    connection: GatewayConnection,
) -> None:
    """Apply frames until the gateway ends the stream or an error occurs; then close it."""
    try:
        await handler.apply(first, connection)
        async for frame in frames:
            await handler.apply(frame, connection)
        connection.close()
    except RequestError as error:
        connection.close(error)
    except Exception:
        log.exception("gateway frame failed")
        connection.close(failed(StatusCode.INTERNAL, "INTERNAL", "the frame failed"))

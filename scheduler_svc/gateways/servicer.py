"""`SchedulerService`: one stream per gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import structlog
from grpc import StatusCode

from quire.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.service.errors import RequestError, abort, failed, unavailable
from scheduler_svc.gateways.connection import GatewayConnection
from scheduler_svc.gateways.desk import Desk

log = structlog.get_logger()

_Context = grpc.aio.ServicerContext[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]
_Frames = AsyncIterator[scheduler_pb2.ConnectRequest]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Frames in, frames out. Without a desk, while this scheduler does not lead, it turns all away
    and names the leader."""

    def __init__(self, leader_address: Callable[[], str]) -> None:
        """`leader_address`: as far as it is known; empty if it is not."""
        self.desk: Desk | None = None
        self._leader_address = leader_address

    async def Connect(  # type: ignore[override]  # noqa: N802
        self, request_iterator: _Frames, context: _Context
    ) -> None:
        """Writes to the context: a write that fails is then this method's to see."""
        desk = self.desk
        try:
            if desk is None:
                raise standby(self._leader_address())
            connection = desk.connect()
        except RequestError as error:
            # A refusal that crosses the first frame would reach the gateway as a failed write.
            await anext(request_iterator, None)
            await abort(context, error)
        reader = asyncio.create_task(_read(request_iterator, desk, connection))
        try:
            async for frame in connection.frames():
                await context.write(frame)
        except RequestError as error:
            await abort(context, error)
        except grpc.aio.InternalError as error:
            # Its gateway has died while it was written to.
            log.info("a gateway has gone", reason=str(error))
        finally:
            reader.cancel()
            desk.disconnect(connection)


def standby(leader_address: str) -> RequestError:
    """What a scheduler answers that does not lead."""
    metadata = {"leader": leader_address} if leader_address else {}
    return unavailable("STANDBY", "this scheduler does not lead", metadata=metadata)


async def _read(frames: _Frames, desk: Desk, connection: GatewayConnection) -> None:
    """Applies frames until there are no more; then, or at an error, the stream ends."""
    try:
        async for frame in frames:
            await desk.apply(frame, connection)
        connection.close()
    except RequestError as error:
        connection.close(error)
    except grpc.aio.AbortError:
        # The stream has been ended from this side.
        pass
    except Exception:
        log.exception("a gateway's frame failed")
        connection.close(failed(StatusCode.INTERNAL, "INTERNAL", "the frame failed"))

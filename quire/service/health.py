"""Health as named checks, served by `grpc.health.v1`.

`""` is the process: alive and configured. `ready` is the service: every check passes; the name of
each gRPC service has the same status. A check's own name is UNKNOWN until the check has run.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.service.channels import PUBLIC_MESSAGE_BYTES
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.UNKNOWN
READY = "ready"


class ListingHealthServicer(health.aio.HealthServicer):
    """Adds List, for the given names, to the library's servicer, which has Check and Watch."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = tuple(names)

    async def List(  # noqa: N802
        self, request: Message, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Message:
        """Convert a HealthListRequest to a HealthListResponse."""
        requests = {name: health_pb2.HealthCheckRequest(service=name) for name in self._names}
        statuses = {name: await self.Check(check, context) for name, check in requests.items()}
        # The published type stubs are older than this message.
        response: Message = health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]
        return response


class Health:
    """Named checks, failing until they pass, and the health servicer that reports them."""

    def __init__(self, checks: Iterable[str], services: Iterable[str] = ()) -> None:
        self._failing = dict.fromkeys(checks, "not checked yet")
        self._is_stopping = False
        self._names = (READY, *services)
        self.servicer = ListingHealthServicer(("", *self._failing, *self._names))
        # Serves health alone; None without a second address.
        self._own_server: Server | None = None

    @property
    def ready(self) -> bool:
        return not self.failing

    @property
    def failing(self) -> dict[str, str]:
        """Failing checks, each with its reason; `process` fails once the service stops."""
        stopping = {"process": "the service is stopping"} if self._is_stopping else {}
        return {**self._failing, **stopping}

    async def start(self) -> None:
        """Set the status of every name. Call it before the server starts."""
        await self.servicer.set("", _SERVING)
        for check in self._failing:
            await self.servicer.set(check, _UNKNOWN)
        await self._publish()

    async def listen(self, address: str) -> None:
        """Serve health alone, without TLS, at a second address. OSError if it cannot be bound."""
        self._own_server = Server(Limits(PUBLIC_MESSAGE_BYTES))
        health_pb2_grpc.add_HealthServicer_to_server(self.servicer, self._own_server)
        self._own_server.bind(address, None)
        await self._own_server.start()

    async def passed(self, check: str) -> None:
        self._failing.pop(check, None)
        await self.servicer.set(check, _SERVING)
        await self._publish()

    async def failed(self, check: str, why: str) -> None:
        self._failing[check] = why
        await self.servicer.set(check, _NOT_SERVING)
        await self._publish()

    async def stopping(self) -> None:
        """Report NOT_SERVING for every name from now on."""
        self._is_stopping = True
        await self.servicer.enter_graceful_shutdown()

    async def close(self) -> None:
        """Stop the server of the second address."""
        if self._own_server is not None:
            await self._own_server.stop(None)

    async def _publish(self) -> None:
        status = _SERVING if self.ready else _NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, status)

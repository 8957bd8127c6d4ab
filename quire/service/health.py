"""Health as named checks, served by `grpc.health.v1`.

`""` is the process: alive and configured. `ready` is the service: every check passes; the name of
each gRPC service has the same status. A check's own name is UNKNOWN until the check has run.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.service.errors import abort, failed
from quire.service.http2.accepting import share_of_files
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.UNKNOWN
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
READY = "ready"
# Of a connection at once. They need no API key, and cost memory and time at every change.
_MAX_WATCHES = 100
# Of the second address, which asks for no certificate and no key, and has few clients.
_OWN_LIMITS: Final = Limits(2**14, max_calls=100, max_unread_bytes=2**20, max_waiting_calls=1000)
_MAX_OWN_CONNECTIONS: Final = 256
_OWN_SHARE_OF_FILES: Final = 0.05

Context = grpc.aio.ServicerContext[Any, Any]
# A value of ServingStatus.
Status: TypeAlias = int


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The status of names. The library's own servicer holds a lock while it writes to a watcher, so
    that a client that does not read keeps a status from changing; and it has no List."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names` are listed."""
        self.names = tuple(names)
        self._statuses: dict[str, Status] = {}
        # Set, and replaced, at every change of any status.
        self._changed = asyncio.Event()
        # By the client's connection.
        self._num_watches = Counter[str]()

    def set(self, name: str, status: Status) -> None:
        self._statuses[name] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Convert a HealthCheckRequest to a HealthCheckResponse."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Convert a HealthListRequest to a HealthListResponse."""
        statuses = {
            name: health_pb2.HealthCheckResponse(status=self._statuses[name]) for name in self.names
        }
        # The published type stubs are older than this message.
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802
        """Write a HealthCheckResponse now and at every change, until the client ends the call."""
        peer = context.peer()
        if self._num_watches[peer] >= _MAX_WATCHES:
            message = f"a connection may have {_MAX_WATCHES} watches; one is enough for each name"
            await abort(context, failed(_EXHAUSTED, "TOO_MANY_WATCHES", message))
        self._num_watches[peer] += 1
        try:
            await self._watch(request.service, context)
        finally:
            self._num_watches[peer] -= 1
            if not self._num_watches[peer]:
                del self._num_watches[peer]

    async def _watch(self, name: str, context: Context) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(name, _SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()


class Health:
    """Named checks, failing until they pass, and the health servicer that reports them."""

    def __init__(self, checks: Iterable[str], services: Iterable[str] = ()) -> None:
        self._failing = dict.fromkeys(checks, "not checked yet")
        self._is_stopping = False
        self._names = (READY, *services)
        self.servicer = HealthServicer(("", *self._failing, *self._names))
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
        self._set("", _SERVING)
        for check in self._failing:
            self._set(check, _UNKNOWN)
        await self._publish()

    async def listen(self, address: str) -> None:
        """Serve health alone, without TLS, at a second address. OSError if it cannot be bound."""
        max_connections = min(_MAX_OWN_CONNECTIONS, share_of_files(_OWN_SHARE_OF_FILES))
        self._own_server = Server(_OWN_LIMITS, max_connections)
        health_pb2_grpc.add_HealthServicer_to_server(self.servicer, self._own_server)
        self._own_server.bind(address, None)
        await self._own_server.start()

    async def passed(self, check: str) -> None:
        self._failing.pop(check, None)
        self._set(check, _SERVING)
        await self._publish()

    async def failed(self, check: str, why: str) -> None:
        self._failing[check] = why
        self._set(check, _NOT_SERVING)
        await self._publish()

    async def stopping(self) -> None:
        """Report NOT_SERVING for every name from now on."""
        self._is_stopping = True
        for name in self.servicer.names:
            self._set(name, _NOT_SERVING)

    async def close(self) -> None:
        """Stop the server of the second address."""
        if self._own_server is not None:
            await self._own_server.stop(None)

    async def _publish(self) -> None:
        status = _SERVING if self.ready else _NOT_SERVING
        for name in self._names:
            self._set(name, status)

    def _set(self, name: str, status: Status) -> None:
        self.servicer.set(name, _NOT_SERVING if self._is_stopping else status)

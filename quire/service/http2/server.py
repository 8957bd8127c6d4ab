"""A gRPC server on the event loop's own thread."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Final

import grpc

from quire.service.http2.accepting import Acceptor, share_of_files
from quire.service.http2.limits import Limits
from quire.service.http2.listening import bind, naming_address
from quire.service.http2.server_call import Handler, Metadata
from quire.service.http2.server_connection import LINGER_S, ServerConnection
from quire.service.http2.unread import UnreadMessages
from quire.service.tls import ServerCertificates

# A handler that was cancelled has this long to clean up before the server counts as stopped.
_CANCELLED_WITHIN_S: Final = 1.0
# That connections may use; the others are for connections to other services.
_SHARE_OF_FILES: Final = 0.5


@dataclass
class _Called(grpc.HandlerCallDetails):
    """What handlers are looked up by."""

    method: str
    invocation_metadata: Metadata = ()


class Server(grpc.aio.Server):
    """Serves the handlers that are added to it as the server of grpc.aio does, but without most
    methods of a handler's context."""

    def __init__(
        self,
        limits: Limits,
        max_connections: int | None = None,
        interceptor: grpc.aio.ServerInterceptor | None = None,
    ) -> None:
        """`max_connections`: by default half of the files that the process may open; the others
        are for connections to other services."""
        self._limits = limits
        self._unread = UnreadMessages(limits.max_unread_bytes, limits.max_waiting_calls)
        self._interceptor = interceptor
        self._handlers: list[grpc.GenericRpcHandler] = []
        # Not listening yet, and how the handshakes are made.
        self._bound: list[tuple[str, socket, ssl.SSLContext | None]] = []
        self._connections: set[ServerConnection] = set()
        self._acceptor = Acceptor(
            self._connection,
            lambda: len(self._connections),
            share_of_files(_SHARE_OF_FILES) if max_connections is None else max_connections,
        )
        self._unix_paths: list[Path] = []
        # Set while there is no connection.
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_stopping = False
        self._is_stopped = asyncio.Event()

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        self._handlers += generic_rpc_handlers

    def bind(self, listen: str, certificates: ServerCertificates | None) -> int:
        """Bind an address, with TLS if there are certificates; a unix socket has none. Return the
        port, of a unix socket 1. OSError if it cannot be bound."""
        is_unix = listen.startswith("unix:")
        context = None if certificates is None or is_unix else certificates.ssl_context()
        bound = bind(listen)
        self._bound += [(listen, one, context) for one in bound]
        if is_unix:
            self._unix_paths.append(Path(bound[0].getsockname()))
            return 1
        return int(bound[0].getsockname()[1])

    def add_insecure_port(self, address: str) -> int:
        return self.bind(address, None)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("gRPC's credentials have no files; `bind` takes certificates")

    async def start(self) -> None:
        """OSError if another server listens on an address, which may have been bound twice."""
        for listen, bound, context in self._bound:
            with naming_address(listen):
                self._acceptor.listen(bound, context)

    async def stop(self, grace: float | None) -> None:
        """Accept nothing more, and let the calls in progress end for at most `grace` seconds; then
        let clients receive the rest of what handlers have returned. Handlers that take long to end
        although they are cancelled are left alone."""
        self._is_stopping = True
        await self._acceptor.close()
        for path in self._unix_paths:
            path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.drain()
        await self._wait_idle(grace or 0)
        for connection in list(self._connections):
            if connection.is_used:
                connection.abort()
        await self._wait_idle(LINGER_S)
        for connection in list(self._connections):
            connection.abort()
        await self._wait_idle(_CANCELLED_WITHIN_S)
        self._is_stopped.set()

    async def _wait_idle(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_idle.wait()

    async def wait_for_termination(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 (as in gRPC's interface)
    ) -> bool:
        """Wait until it has stopped; return whether the time was over before."""
        try:
            async with asyncio.timeout(timeout):
                await self._is_stopped.wait()
        except TimeoutError:
            return True
        return False

    def _connection(self) -> ServerConnection:
        return ServerConnection(
            self._find_handler, self._limits, self._unread, self._opened, self._closed
        )

    async def _find_handler(self, path: str, metadata: Callable[[], Metadata]) -> "Handler | None":
        if self._interceptor is None:
            return self._handler_of(_Called(path))
        return await self._interceptor.intercept_service(self._look_up, _Called(path, metadata()))

    async def _look_up(self, called: grpc.HandlerCallDetails) -> "Handler | None":
        return self._handler_of(called)

    def _handler_of(self, called: grpc.HandlerCallDetails) -> "Handler | None":
        found = (handlers.service(called) for handlers in self._handlers)
        return next((handler for handler in found if handler is not None), None)

    def _opened(self, connection: ServerConnection) -> None:
        self._connections.add(connection)
        self._is_idle.clear()
        if self._is_stopping:
            connection.drain()

    def _closed(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._is_idle.set()

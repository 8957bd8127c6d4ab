"""Runs uvicorn within the gateway's event loop, from start to stop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway_svc.access.authentication import Authentication
from gateway_svc.admission.http_connection import connection_type
from gateway_svc.admission.live_limits import LiveLimits
from gateway_svc.admission.web_pages import WebPages
from gateway_svc.http.live_requests import LiveRequests
from gateway_svc.http.traced_app import TracedApp
from gateway_svc.tracing.call_trace import CallTracing
from quire.service.addresses import is_loopback
from quire.service.files import replace_contents
from quire.service.http2.accepting import BACKLOG, Acceptor, share_of_files
from quire.service.http2.listening import bind
from quire.service.tls import ServerCertificates

log = structlog.get_logger()

_SHUTDOWN_S = 1
# How often the Date header is set.
_TICK_S = 1.0
# Of the files that the process may open, that connections may use. Those of gRPC may use half.
_SHARE_OF_FILES = 0.375


class HttpServer:
    """Serves an application on one address."""

    def __init__(
        self,
        app: FastAPI,
        listen: str,
        limits: LiveLimits,
        authentication: Authentication,
        certificates: ServerCertificates | None,
        tracing: CallTracing,
        max_connection_age_s: float | None,
        allowed_origins: tuple[str, ...],
    ) -> None:
        """`listen` is host:port; port 0 picks a free one. With certificates it is HTTPS. Without an
        age connections last as long as clients use them. Web pages of the allowed origins may use
        the API, as the gateway's own may."""
        self._listen = listen
        is_open = not authentication.needs_keys and certificates is None
        pages = WebPages(allowed_origins, is_open and is_loopback(listen))
        self.requests = LiveRequests(app, limits, authentication, pages)
        # The address, after the start.
        self.address = listen
        config = uvicorn.Config(
            _with_cors(TracedApp(self.requests, tracing), allowed_origins),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            http=connection_type(max_connection_age_s),
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        config.load()
        if certificates is not None:
            config.ssl = certificates.ssl_context()
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, address_file: Path | None) -> None:
        """Bind, write the address to the file, and serve. OSError if it cannot be bound."""
        sockets = await asyncio.to_thread(_bind, self._listen)
        host = self._listen.rpartition(":")[0]
        self.address = f"{host}:{sockets[0].getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve(sockets))
        if address_file is not None:
            replace_contents(address_file, self.address)
        log.info("serving HTTP", address=self.address, tls=self._server.config.ssl is not None)

    async def stop(self) -> None:
        """End all requests and connections."""
        if self._task is not None:
            self._server.exit()
            await asyncio.gather(self._task, return_exceptions=True)
            tasks = list(self._server.server_state.tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_SHUTDOWN_S)


def _with_cors(app: ASGIApp, allowed_origins: tuple[str, ...]) -> ASGIApp:
    """Let pages of these origins send requests and read responses in a browser. Keys are in
    headers that the pages set themselves, so no credentials of the browser are needed."""
    if not allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=("X-Request-Id", "Request-Id", "Retry-After"),
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exiting = asyncio.Event()
        self._acceptor = Acceptor(
            self._connection,
            lambda: len(self.server_state.connections),
            share_of_files(_SHARE_OF_FILES),
        )

    def exit(self) -> None:
        """End without waiting for connections and requests."""
        self.should_exit = True
        self.force_exit = True
        self._exiting.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections up to a limit, which uvicorn's own servers have not."""
        self.servers = []
        for bound in sockets or ():
            self._acceptor.listen(bound, self.config.ssl)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.close()
        await super().shutdown(sockets)

    def _connection(self) -> asyncio.Protocol:
        # Its type is that of a factory, whose parameters uvicorn does not declare.
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def main_loop(self) -> None:
        """Wake for the Date header and for the end; uvicorn's own loop wakes ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._exiting.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The gateway handles signals itself."""
        yield


def _bind(listen: str) -> list[socket.socket]:
    """Listening sockets for the addresses of the name, as of gRPC. OSError with the address."""
    try:
        sockets = bind(listen)
        for bound in sockets:
            # At once: the address is published before uvicorn's first step.
            bound.listen(BACKLOG)
        return sockets
    except OSError as error:
        reason = str(error).partition(f"{listen}: ")[2] or error
        raise OSError(f"cannot serve HTTP on {listen}: {reason}") from error

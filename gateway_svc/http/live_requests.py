"""Counts live HTTP requests, and refuses those of foreign pages and beyond the gateway's limits."""

import asyncio
from collections.abc import Awaitable

import grpc
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from gateway_svc.access.authentication import Authentication, authorization
from gateway_svc.admission.live_limits import HeldBytes, LiveLimits, stopping
from gateway_svc.admission.web_pages import WebPages
from gateway_svc.http.dialects import dialect_of
from gateway_svc.http.errors import BODY_TIMEOUT, to_http
from gateway_svc.http.response_writer import ResponseWriter
from quire.service.errors import RequestError, failed

# Longest time between two parts of a body.
_BODY_TIMEOUT_S = 30.0
# Of operators, who look at a gateway that is full or stops.
_ALWAYS = ("/health", "/ready", "/version", "/metrics")


class LiveRequests:
    """An ASGI application around the gateway's. The limits are those of gRPC calls, too."""

    def __init__(
        self, app: FastAPI, limits: LiveLimits, authentication: Authentication, pages: WebPages
    ) -> None:
        self._app = app
        self._pages = pages
        self._authentication = authentication
        self._limits = limits
        self._num_live = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until no request is live. Operators' requests are not counted."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # As without it: a redirect would need the scheme and the host that the client has used,
        # which a proxy hides.
        scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            self._pages.check(scope["method"], Headers(scope=scope))
        except RequestError as error:
            await _write(error, scope, send)
            return
        if scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        self._num_live += 1
        self._idle.clear()
        try:
            with self._limits.hold(principal=self._principal(scope)) as held:
                await self._run(scope, _counted(receive, held), send)
        except RequestError as error:
            # Of the limits or the end: the application's own errors are responses.
            await _write(error, scope, send)
        finally:
            self._num_live -= 1
            if not self._num_live:
                self._idle.set()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. A request that ends without a response because the gateway stops,
        such as one whose body has not arrived, gets the error of those that come later."""
        has_started = False

        def noting(message: Message) -> Awaitable[None]:
            nonlocal has_started
            has_started = True
            return send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if has_started or not self._limits.is_stopping:
                raise
        if not has_started and self._limits.is_stopping:
            raise stopping()

    def _principal(self, scope: Scope) -> str:
        """The tenant that sends a request; empty without a key that is known: the application
        refuses such a request, if it needs a key, before it reads a body."""
        try:
            return self._authentication.authenticate(authorization(Headers(scope=scope))).principal
        except RequestError:
            return ""


async def _write(error: RequestError, scope: Scope, send: Send) -> None:
    await ResponseWriter(send, dialect=dialect_of(scope["path"])).error(to_http(error))


def _counted(receive: Receive, held: HeldBytes) -> Receive:
    """Count the bytes of the body as they arrive: an announced length costs a client nothing. The
    returned function raises a RequestError if they are too many, or if none arrive for a while."""
    is_complete = False

    async def counted() -> Message:
        nonlocal is_complete
        if is_complete:
            return await receive()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            raise _body_timeout() from None
        if message["type"] == "http.request":
            held.add(len(message.get("body", b"")))
        is_complete = not message.get("more_body", False)
        return message

    return counted


def _body_timeout() -> RequestError:
    message = f"no byte of the body has arrived for {_BODY_TIMEOUT_S:g} s"
    return failed(grpc.StatusCode.DEADLINE_EXCEEDED, BODY_TIMEOUT, message)

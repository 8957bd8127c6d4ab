"""Counts live HTTP requests, and refuses those beyond the gateway's limits."""

import asyncio

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway_svc.admission.live_limits import LiveLimits
from gateway_svc.http.errors import to_http
from gateway_svc.http.response_writer import ResponseWriter
from quire.service.errors import RequestError

# Of operators, who look at a gateway that is full or stops.
_ALWAYS = ("/health", "/ready", "/version", "/metrics")


class LiveRequests:
    """An ASGI application around the gateway's. The limits are those of gRPC calls, too."""

    def __init__(self, app: FastAPI, limits: LiveLimits) -> None:
        self._app = app
        self._limits = limits
        self._num_live = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until no request is live. Operators' requests are not counted."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        self._num_live += 1
        self._idle.clear()
        try:
            with self._limits.hold(_num_bytes(scope)):
                await self._app(scope, receive, send)
        except RequestError as error:
            # Of the limits: the application's own errors are responses.
            failure = to_http(error)
            writer = ResponseWriter(send)
            await writer.json(failure.status, failure.body, failure.retry_after_s)
        finally:
            self._num_live -= 1
            if not self._num_live:
                self._idle.set()


def _num_bytes(scope: Scope) -> int:
    """The size of the body as announced; 0 if it is sent in chunks."""
    length = Headers(scope=scope).get("content-length", "0")
    return int(length) if length.isdecimal() else 0

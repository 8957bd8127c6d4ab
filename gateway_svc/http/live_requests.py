"""Counts live HTTP requests, and refuses new ones while the gateway stops."""

import asyncio

from fastapi import FastAPI

from gateway_svc.http.errors import to_http
from gateway_svc.http.response_writer import Receive, ResponseWriter, Send
from quire.service.errors import unavailable

# Of operators, who look at a gateway that drains.
_ALWAYS = ("/health", "/ready", "/version", "/metrics")


class LiveRequests:
    """An ASGI application around the gateway's."""

    def __init__(self, app: FastAPI) -> None:
        self.num_live = 0
        # New requests are refused: the gateway stops.
        self.is_refusing = False
        self._app = app
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse(self) -> None:
        """Respond to new requests that the gateway stops."""
        self.is_refusing = True

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    async def __call__(self, scope: dict[str, object], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        if self.is_refusing:
            failure = to_http(unavailable("STOPPING", "the gateway is stopping"))
            writer = ResponseWriter(send)
            await writer.json(failure.status, failure.body, failure.retry_after_s)
            return
        self.num_live += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_live -= 1
            if not self.num_live:
                self._idle.set()

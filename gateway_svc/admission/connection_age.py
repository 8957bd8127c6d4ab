"""Closes HTTP connections of a certain age, each with a response that says so."""

import random
from asyncio import BaseTransport
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# So that connections that were opened together are not closed together; gRPC's is the same.
_JITTER: Final = 0.1


def protocol_with_age(max_age_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol; the first response to a request that arrives after about this age ends
    the connection."""

    class AgingProtocol(HttpToolsProtocol):
        def connection_made(self, transport: BaseTransport) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            age_s = max_age_s * random.uniform(1 - _JITTER, 1 + _JITTER)
            self._closes_at = self.loop.time() + age_s

        def on_headers_complete(self) -> None:
            if self.loop.time() >= self._closes_at:
                self.app = _closing(self.app)
            super().on_headers_complete()

    return AgingProtocol


def _closing(app: ASGIApp) -> ASGIApp:
    """Add the header by which uvicorn closes the connection, and the client sends no further
    request on it."""

    async def closing(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message.get("headers", []), (b"connection", b"close")],
                }
            await send(message)

        await app(scope, receive, send_closing)

    return closing

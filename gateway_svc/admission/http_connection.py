"""Limits of an HTTP connection: its age, the time for headers, bodies that are not read, and
responses that are not taken."""

import random
from asyncio import BaseTransport, TimerHandle
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway_svc.admission.http_protocol import HttpProtocol
from quire.service.http2.unread import TAKING_S

# So that connections that were opened together are not closed together; gRPC's is the same.
_JITTER: Final = 0.1
# Longest time from the opening of a connection, or the first byte of a request, to the end of the
# request's headers.
HEADER_TIMEOUT_S: Final = 30.0
# After a response, the rest of the request's body is read and discarded for a while, since many
# clients read a response when they have sent all; slowly, since it costs the others time.
UNREAD_BURST_BYTES: Final = 2**18
UNREAD_PAUSE_S: Final = 0.05
LINGER_S: Final = 5.0
# Time to read the response, for a client whose body is not read any more.
CLOSE_AFTER_S: Final = 1.0


class HttpConnection(HttpProtocol):
    """The protocol, with limits for clients that send slowly or too much, or take nothing."""

    max_age_s: float | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._closes_at = float("inf")
        if self.max_age_s is not None:
            age_s = self.max_age_s * random.uniform(1 - _JITTER, 1 + _JITTER)
            self._closes_at = self.loop.time() + age_s
        self._has_begun = False
        self._num_unread = 0
        # The limit for headers or, after them, for a body that is discarded.
        self._limit: TimerHandle | None = None
        self._pause: TimerHandle | None = None
        # The limit for a client that has not taken all that was sent.
        self._taking: TimerHandle | None = None
        self._limit_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_limit()
        self._end_taking()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._num_unread = 0
        self._end_limit()
        self._limit_headers()

    def on_headers_complete(self) -> None:
        self._end_limit()
        if self.loop.time() >= self._closes_at:
            # Once, also if the headers are parsed again.
            self._closes_at = float("inf")
            self.app = _closing(self.app)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        is_read = not self.cycle.response_complete
        super().on_body(body)
        if is_read:
            return
        if self._limit is None:
            self._limit = self.loop.call_later(LINGER_S, self._stop_reading)
        self._num_unread += len(body)
        if self._num_unread >= UNREAD_BURST_BYTES and self._pause is None:
            self.flow.pause_reading()
            self._pause = self.loop.call_later(UNREAD_PAUSE_S, self._read_on)

    def on_message_complete(self) -> None:
        self._end_limit()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_taking()

    def resume_writing(self) -> None:
        self._end_taking()
        super().resume_writing()

    def _limit_taking(self) -> None:
        num_left = self.transport.get_write_buffer_size()
        self._taking = self.loop.call_later(TAKING_S, self._check_taken, num_left)

    def _check_taken(self, num_before: int) -> None:
        """A connection that is only closed would wait for its client to take the rest."""
        if self.transport.get_write_buffer_size() < num_before:
            self._limit_taking()
        else:
            self.transport.abort()

    def _end_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def _limit_headers(self) -> None:
        self._limit = self.loop.call_later(HEADER_TIMEOUT_S, self._end_headers)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if self._pause is not None:
            self._pause.cancel()
            self._read_on()

    def _end_headers(self) -> None:
        """The headers have not arrived in time. The next request's may wait while one is served."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._limit_headers()
        elif not self._has_begun:
            self.transport.close()
        else:
            message = f"the request's headers have not arrived within {HEADER_TIMEOUT_S:g} s"
            self.send_error(408, "Request Timeout", "header_timeout", message)

    def _read_on(self) -> None:
        self._pause = None
        self._num_unread = 0
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _stop_reading(self) -> None:
        """The client can still read the response; then the connection is closed."""
        self._end_limit()
        self.flow.pause_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._limit = self.loop.call_later(CLOSE_AFTER_S, self.transport.abort)


def connection_type(max_age: float | None) -> type[HttpConnection]:
    """The type of connections that the first response to a request after about this age ends;
    without an age they last as long as clients use them."""

    class AgingConnection(HttpConnection):
        max_age_s = max_age

    return AgingConnection


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

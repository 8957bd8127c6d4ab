"""Writes responses to ASGI: server-sent events, without a task per event, or one JSON object."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import orjson

from gateway_svc.http.dialects import OPENAI, Dialect
from gateway_svc.http.errors import HttpError
from gateway_svc.http.formats.format import ServerEvent

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# The events of an error in the format of a stream.
ErrorEvents = Callable[[HttpError], Iterable[ServerEvent]]

# Shorter than the idle timeouts of common proxies.
KEEP_ALIVE_S = 15.0
_COMMENT = b": keep-alive\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise hold events back.
    (b"x-accel-buffering", b"no"),
]


class ResponseWriter:
    """One response: events after `start`, or one object without it."""

    def __init__(
        self, send: Send, request_id: str = "", has_ids: bool = True, dialect: Dialect = OPENAI
    ) -> None:
        """`has_ids`: whether events have an `id:`, which clients that parse `data:` alone do not
        expect."""
        self.has_started = False
        self._send = send
        self._has_ids = has_ids
        self._dialect = dialect
        self._headers = [
            (name.encode(), value.encode())
            for name, value in dialect.id_headers(request_id).items()
        ]
        self._error_events: ErrorEvents = lambda error: ()
        self._written_at = 0.0

    def use(self, dialect: Dialect) -> None:
        """Write what follows in another dialect; the headers stay as they are."""
        self._dialect = dialect

    def use_for_errors(self, events: ErrorEvents) -> None:
        """End the stream with these events of an error, unless there are none."""
        self._error_events = events

    async def start(self) -> None:
        """Start a stream of events, unless it has started."""
        if not self.has_started:
            await self._start(200, _EVENT_HEADERS)

    async def events(self, events: Iterable[ServerEvent], position: object) -> None:
        """Write events. After the last one the client has all that is before `position`, whose
        text is its id."""
        data = [_encoded(event) for event in events]
        if data:
            data[-1] = self._id(position) + data[-1]
            await self._write(b"".join(data))

    async def end(self, last_id: str) -> None:
        """End the stream, with `[DONE]` if its clients expect that."""
        data = self._id(last_id) + b"data: [DONE]\n\n" if self._dialect.has_done else b""
        await self._send({"type": "http.response.body", "body": data})

    async def keep_alive(self) -> None:
        """Write a comment if no event was written for a while."""
        is_idle = asyncio.get_running_loop().time() - self._written_at >= KEEP_ALIVE_S
        if self.has_started and is_idle:
            await self._write(_COMMENT)

    async def json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """Write an object as the whole response."""
        data = orjson.dumps(body)
        fixed = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
        ]
        others = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await self._start(status, fixed + others)
        await self._send({"type": "http.response.body", "body": data})

    async def error(self, error: HttpError) -> None:
        """Write an error as the whole response, or as the end of a stream, without `[DONE]`."""
        body = self._dialect.error_body(error)
        if not self.has_started:
            await self.json(error.status, body, error.headers)
            return
        own = ServerEvent(body, self._dialect.error_event)
        data = b"".join(map(_encoded, [*self._error_events(error)] or [own]))
        await self._send({"type": "http.response.body", "body": data})

    def _id(self, position: object) -> bytes:
        return b"id: %b\n" % str(position).encode() if self._has_ids else b""

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_started = True
        headers = [*headers, *self._headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes) -> None:
        self._written_at = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


def _encoded(event: ServerEvent) -> bytes:
    data = orjson.dumps(event.data)
    if event.name is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (event.name.encode(), data)

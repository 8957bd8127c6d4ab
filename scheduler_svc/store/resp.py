"""One socket to Redis: pipelined commands, with replies in the same order (RESP2).

A cancelled call keeps its place in the pipeline: its reply is read and dropped, so that later
replies still match their commands.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Argument = bytes | str | int

_END = b"\r\n"


class ReplyError(Exception):
    """An error reply of Redis: a code and a message."""


class RespConnectionLost(Exception):
    """The connection is lost; commands without a reply may have been executed."""


def pack(command: Iterable[Argument]) -> bytes:
    """Encode a command."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(p), p) for p in parts])


class ReplyReader:
    """Parses replies: strings become bytes, arrays lists, errors ReplyError."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        # Incomplete arrays, outermost first: elements so far, and the full length.
        self._open: list[tuple[list[Any], int]] = []

    def feed(self, data: bytes) -> list[Any]:
        """Parse more bytes; return the replies they complete. ValueError for malformed data."""
        buffer = self._buffer
        buffer += data
        replies: list[Any] = []
        start = 0
        while (end := buffer.find(_END, start)) >= 0:
            kind, text = buffer[start], bytes(buffer[start + 1 : end])
            behind = end + 2
            if kind == 0x24 and text != b"-1":  # $
                first, behind = behind, behind + int(text) + 2
                if len(buffer) < behind:
                    break
                self._complete(bytes(buffer[first : behind - 2]), replies)
            elif kind == 0x2A and text not in (b"0", b"-1"):  # *
                self._open.append(([], int(text)))
            else:
                self._complete(_simple(kind, text), replies)
            start = behind
        del buffer[:start]
        return replies

    def _complete(self, value: Any, replies: list[Any]) -> None:
        """Add a value, and complete the arrays whose last element it is."""
        while self._open:
            array, length = self._open[-1]
            array.append(value)
            if len(array) < length:
                return
            self._open.pop()
            value = array
        replies.append(value)


def _simple(kind: int, text: bytes) -> Any:
    """Parse a reply of one line."""
    match chr(kind):
        case "+":
            return text
        case ":":
            return int(text)
        case "-":
            return ReplyError(text.decode(errors="replace"))
        case "$":
            return None
        case "*":
            return [] if text == b"0" else None
    raise ValueError(f"no reply starts with {chr(kind)!r}")


@dataclass(slots=True)
class _Pending:
    """Commands sent together, and their replies so far."""

    result: "asyncio.Future[list[Any]]"
    num_replies: int
    deadline: float  # of the loop's clock
    replies: list[Any] = field(default_factory=list)


class RespConnection(asyncio.Protocol):
    """Takes over a connected transport without unread data."""

    def __init__(self, transport: asyncio.WriteTransport, timeout_s: float) -> None:
        self.is_lost = transport.is_closing()
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = ReplyReader()
        self._pipeline: deque[_Pending] = deque()
        # A single timer, set to the deadline of the oldest entry.
        self._timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._closed = asyncio.Event()
        transport.set_protocol(self)

    def send(self, commands: Sequence[bytes]) -> "asyncio.Future[list[Any]]":
        """Send packed commands; the future yields their replies, errors included. TimeoutError if
        they are late, and RespConnectionLost for all other calls in progress then."""
        pending = _Pending(
            self._loop.create_future(), len(commands), self._loop.time() + self._timeout_s
        )
        self._pipeline.append(pending)
        self._drained.clear()
        self._transport.write(commands[0] if len(commands) == 1 else b"".join(commands))
        if self._timer is None:
            self._timer = self._loop.call_at(pending.deadline, self._check_deadline)
        return pending.result

    async def close(self) -> None:
        """Close after the calls in progress."""
        if self._pipeline and not self.is_lost:
            await self._drained.wait()
        self._transport.close()
        if not self.is_lost:
            await self._closed.wait()

    def drop(self) -> None:
        """Close at once. RespConnectionLost for all calls in progress."""
        self._fail(RespConnectionLost("the connection was dropped"))

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._reader.feed(data)
        except ValueError as error:
            self._fail(RespConnectionLost(str(error)))
            return
        for reply in replies:
            self._deliver(reply)
        if not self._pipeline:
            self._drained.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(RespConnectionLost(str(error or "Redis has closed the connection")))
        self._closed.set()

    def _deliver(self, reply: Any) -> None:
        if not self._pipeline:
            self._fail(RespConnectionLost("Redis sent a reply without a command"))
            return
        pending = self._pipeline[0]
        pending.replies.append(reply)
        if len(pending.replies) == pending.num_replies:
            self._pipeline.popleft()
            if not pending.result.done():
                pending.result.set_result(pending.replies)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._pipeline:
            return
        now = self._loop.time()
        if now < self._pipeline[0].deadline:
            self._timer = self._loop.call_at(self._pipeline[0].deadline, self._check_deadline)
            return
        for pending in self._pipeline:
            if pending.deadline <= now and not pending.result.done():
                pending.result.set_exception(TimeoutError())
        self._fail(RespConnectionLost("an earlier call has timed out"))

    def _fail(self, why: RespConnectionLost) -> None:
        self.is_lost = True
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._pipeline:
            pending = self._pipeline.popleft()
            if not pending.result.done():
                pending.result.set_exception(RespConnectionLost(*why.args))
        self._drained.set()

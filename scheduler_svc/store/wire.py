"""One socket to Redis: commands go out at once, replies come in the same order (RESP2).

Whoever does not wait for a reply any more leaves its place in the line: the reply is read and
dropped, and the next one meets the command that it answers.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Argument = bytes | str | int

_END = b"\r\n"


class ReplyError(Exception):
    """What Redis answers instead of a reply: a code and a message."""


class WireLost(Exception):
    """The socket is gone; commands without a reply may have been carried out."""


def pack(command: Iterable[Argument]) -> bytes:
    """A command as it travels."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(p), p) for p in parts])


class ReplyReader:
    """Bytes to replies: strings are bytes, an array is a list, an error is a ReplyError."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        # Arrays that are not complete, outermost first: what is there, and what is missing.
        self._open: list[tuple[list[Any], int]] = []

    def feed(self, data: bytes) -> list[Any]:
        """The replies that are complete with these bytes. ValueError for what is no reply."""
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
                self._complete(_short(kind, text), replies)
            start = behind
        del buffer[:start]
        return replies

    def _complete(self, value: Any, replies: list[Any]) -> None:
        """A value is there, and with it the arrays whose last one it is."""
        while self._open:
            array, length = self._open[-1]
            array.append(value)
            if len(array) < length:
                return
            self._open.pop()
            value = array
        replies.append(value)


def _short(kind: int, text: bytes) -> Any:
    """A reply of one line."""
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
    raise ValueError(f"{chr(kind)!r} begins no reply")


@dataclass(slots=True)
class _Asked:
    """Commands that were sent together, and their replies so far."""

    answer: "asyncio.Future[list[Any]]"
    num_replies: int
    deadline: float  # of the loop's clock
    replies: list[Any] = field(default_factory=list)


class Wire(asyncio.Protocol):
    """Takes a connected transport over; nothing on it is unread."""

    def __init__(self, transport: asyncio.WriteTransport, timeout_s: float) -> None:
        self.is_lost = transport.is_closing()
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = ReplyReader()
        self._line: deque[_Asked] = deque()
        # One for all: it looks at the oldest, and is set anew while there is one.
        self._timer: asyncio.TimerHandle | None = None
        self._rested = asyncio.Event()
        self._closed = asyncio.Event()
        transport.set_protocol(self)

    def ask(self, commands: Sequence[bytes]) -> "asyncio.Future[list[Any]]":
        """Sends packed commands; their replies, errors among them. TimeoutError where they have not
        come in time, and WireLost for all others under way then."""
        asked = _Asked(
            self._loop.create_future(), len(commands), self._loop.time() + self._timeout_s
        )
        self._line.append(asked)
        self._rested.clear()
        self._transport.write(commands[0] if len(commands) == 1 else b"".join(commands))
        if self._timer is None:
            self._timer = self._loop.call_at(asked.deadline, self._look)
        return asked.answer

    async def close(self) -> None:
        """Behind what is under way."""
        if self._line and not self.is_lost:
            await self._rested.wait()
        self._transport.close()
        if not self.is_lost:
            await self._closed.wait()

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._reader.feed(data)
        except ValueError as error:
            self._lose(WireLost(str(error)))
            return
        for reply in replies:
            self._take(reply)
        if not self._line:
            self._rested.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(WireLost(str(error or "Redis has closed the connection")))
        self._closed.set()

    def _take(self, reply: Any) -> None:
        if not self._line:
            self._lose(WireLost("Redis answers what nobody asked"))
            return
        asked = self._line[0]
        asked.replies.append(reply)
        if len(asked.replies) == asked.num_replies:
            self._line.popleft()
            if not asked.answer.done():
                asked.answer.set_result(asked.replies)

    def _look(self) -> None:
        self._timer = None
        if not self._line:
            return
        now = self._loop.time()
        if now < self._line[0].deadline:
            self._timer = self._loop.call_at(self._line[0].deadline, self._look)
            return
        for asked in self._line:
            if asked.deadline <= now and not asked.answer.done():
                asked.answer.set_exception(TimeoutError())
        self._lose(WireLost("an earlier call has not been answered"))

    def _lose(self, why: WireLost) -> None:
        self.is_lost = True
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._line:
            asked = self._line.popleft()
            if not asked.answer.done():
                asked.answer.set_exception(WireLost(*why.args))
        self._rested.set()

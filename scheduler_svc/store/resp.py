"""One socket to Redis: pipelined commands, with replies in the same order (RESP2).

A cancelled call keeps its place in the pipeline: its reply is read and dropped, so that later
replies still match their commands.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Argument = bytes | str | int

_END = b"\r\n"


class ReplyError(Exception):
    """An error reply of Redis: a code and a message."""


class RespConnectionLost(Exception):
    """The connection is lost; commands without a reply may have been executed."""


def pack(command: Iterable[Argument]) -> bytes:
    """Encode a command."""
    parts = tuple(command)
    return b"*%d\r\n" % len(parts) + pack_arguments(parts)


def pack_arguments(arguments: Iterable[Argument]) -> bytes:
    """Encode parts of a command; before all of them comes their number."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in arguments]
    return b"".join(map(pack_argument, parts))


def pack_argument(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


class ReplyReader:
    """Parses replies: strings become bytes, arrays lists, errors ReplyError."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        # Incomplete arrays, outermost first: elements so far, and the full length.
        self._open: list[tuple[list[Any], int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether no reply has begun."""
        return not (self._buffer or self._open)

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


def whole_string(data: bytes) -> bytes | None:
    """The string, if the data is a reply with one and nothing else: the common case."""
    if data[:1] != b"$" or data[-2:] != _END:
        return None
    end = data.find(_END)
    is_whole = data[1:end].isdigit() and int(data[1:end]) == len(data) - end - 4
    return data[end + 2 : -2] if is_whole else None


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


class _Pending:
    """Commands sent together, and their replies so far."""

    __slots__ = ("deadline", "num_replies", "on_end", "replies")

    def __init__(
        self, on_end: Callable[[list[Any] | Exception], None], num_replies: int, deadline: float
    ) -> None:
        """`on_end` gets the replies, or why there are none; `deadline` is of the loop's clock."""
        self.on_end = on_end
        self.num_replies = num_replies
        self.deadline = deadline
        self.replies: list[Any] = []


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
        # Set when the pipeline is empty, if `close` waits for that.
        self._drained: asyncio.Event | None = None
        self._closed = asyncio.Event()
        transport.set_protocol(self)

    def send(self, commands: Sequence[bytes]) -> "asyncio.Future[list[Any]]":
        """Send packed commands; the future yields their replies, errors included. TimeoutError if
        they are late, and RespConnectionLost for all other calls in progress then, or if the
        connection is lost already."""
        if self.is_lost:
            # The server may have closed it as soon as it was open: uvloop refuses the write.
            raise RespConnectionLost("Redis has closed the connection")
        result: asyncio.Future[list[Any]] = self._loop.create_future()

        def resolve(replies: list[Any] | Exception) -> None:
            if result.done():
                return
            if isinstance(replies, Exception):
                result.set_exception(replies)
            else:
                result.set_result(replies)

        packed = commands[0] if len(commands) == 1 else b"".join(commands)
        self.send_packed(packed, len(commands), resolve)
        return result

    def send_packed(
        self, packed: bytes, num_commands: int, on_end: Callable[[list[Any] | Exception], None]
    ) -> None:
        """Send packed commands. `on_end` is called once, as soon as their replies are there, errors
        included, or with the exception of `send`."""
        deadline = self._loop.time() + self._timeout_s
        self._pipeline.append(_Pending(on_end, num_commands, deadline))
        self._transport.write(packed)
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check_deadline)

    async def close(self) -> None:
        """Close after the calls in progress."""
        if self._pipeline and not self.is_lost:
            self._drained = asyncio.Event()
            await self._drained.wait()
        self._transport.close()
        if not self.is_lost:
            await self._closed.wait()

    def drop(self) -> None:
        """Close at once. RespConnectionLost for all calls in progress."""
        self._fail(RespConnectionLost("the connection was dropped"))

    def data_received(self, data: bytes) -> None:
        pipeline = self._pipeline
        if (
            pipeline
            and pipeline[0].num_replies == 1
            and self._reader.is_empty
            and (whole := whole_string(data)) is not None
        ):
            # The common case: one call with one string.
            pipeline.popleft().on_end([whole])
            self._note_drained()
            return
        try:
            replies = self._reader.feed(data)
        except ValueError as error:
            self._fail(RespConnectionLost(str(error)))
            return
        for reply in replies:
            self._deliver(reply)
        self._note_drained()

    def _note_drained(self) -> None:
        if self._drained is not None and not self._pipeline:
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
            pending.on_end(pending.replies)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._pipeline:
            return
        now = self._loop.time()
        if now < self._pipeline[0].deadline:
            self._timer = self._loop.call_at(self._pipeline[0].deadline, self._check_deadline)
            return
        self._fail(RespConnectionLost("an earlier call has timed out"), late_at=now)

    def _fail(self, why: RespConnectionLost, late_at: float = 0.0) -> None:
        """End the connection. TimeoutError for calls whose deadline is over at `late_at`."""
        self.is_lost = True
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._pipeline:
            pending = self._pipeline.popleft()
            is_late = pending.deadline <= late_at
            pending.on_end(TimeoutError() if is_late else RespConnectionLost(*why.args))
        if self._drained is not None:
            self._drained.set()

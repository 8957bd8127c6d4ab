"""One streaming gRPC call, the only one of its HTTP/2 connection."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from grpc import StatusCode
from hpack import Encoder

from quire.service.http2 import frames
from quire.service.http2.call_status import CallEnded, code_of_reset, status_of
from quire.service.http2.frames import Frame, FrameReader, ProtocolError
from quire.service.http2.headers import HeaderBlocks, Headers, pack_headers
from quire.service.http2.messages import PREFIX, MessageReader, pack_message

# Of frames; under names that are found at once.
_FRAME_HEADER: Final = frames.HEADER
_U32: Final = frames.U32
_DATA: Final = frames.DATA
_WINDOW_UPDATE: Final = frames.WINDOW_UPDATE
# The first stream of a client.
_STREAM: Final = 1
_MAX_FRAME_BYTES: Final = 2**20
# Received bytes after which the windows are raised to their maximum again.
_WINDOW_STEP: Final = 2**24
_PING: Final = bytes(8)
# Timers that are late by this time may run before what has arrived is read.
_LATE_S: Final = 0.25


@dataclass(frozen=True)
class KeepAlive:
    """A peer that sends nothing for `after_s` is sent a ping; if it sends nothing for another
    `within_s`, the call ends with UNAVAILABLE."""

    after_s: float
    within_s: float


class StreamCall(asyncio.Protocol):
    """Sends and receives messages; it has begun when it is connected.

    Messages wait here while the peer's windows are full: the caller bounds what it sends. The
    peer's are never full, because what has been received is handled at once.
    """

    def __init__(
        self,
        path: str,
        authority: str,
        max_message_bytes: int,
        on_message: Callable[[bytes], None],
        on_end: Callable[[CallEnded], None],
        keep_alive: KeepAlive | None = None,
    ) -> None:
        """`path`: /package.Service/Method. `on_end` is called once. Without `keep_alive`, a peer
        that is stopped or cut off is not noticed."""
        # None while the call goes on.
        self.ended: CallEnded | None = None
        self._path = path
        self._authority = authority
        self._on_message = on_message
        self._on_end = on_end
        self._keep_alive = keep_alive
        self._received_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._frames = FrameReader(_MAX_FRAME_BYTES)
        self._messages = MessageReader(max_message_bytes)
        self._headers = HeaderBlocks()
        self._transport: asyncio.WriteTransport
        # What may be sent: in the connection, in the stream, in a frame.
        self._connection_window = self._stream_window = frames.DEFAULT_WINDOW
        self._initial_window = frames.DEFAULT_WINDOW
        self._frame_size = frames.DEFAULT_FRAME_SIZE
        self._unsent = bytearray()
        self._is_half_closed = False
        # Whether the socket takes no more now.
        self._is_paused = False
        # Set when nothing waits any more, or the call has ended; None if no sender waits.
        self._sent: asyncio.Event | None = None
        self._num_received = 0

    # Sending

    def send(self, message: bytes) -> None:
        """Send a message. CallEnded if the call has ended."""
        if self.ended is not None:
            raise self.ended
        data = pack_message(message)
        if not self._unsent and len(data) <= self._sendable:
            self._write(data)
        else:
            self._unsent += data
            self._send_rest()

    async def wait_sent(self) -> None:
        """Wait until the peer and the socket have taken all messages, or the call has ended."""
        while self.ended is None and (self._unsent or self._is_paused):
            self._sent = self._sent or asyncio.Event()
            await self._sent.wait()

    def half_close(self) -> None:
        """Let the peer know that no message follows the sent ones. No effect if the call has
        ended."""
        if self.ended is None:
            self._is_half_closed = True
            self._end_sending()

    def cancel(self) -> None:
        """Cancel the call, unless it has ended, and close the connection."""
        if self.ended is None:
            # Without a connection there is nothing to reset.
            with contextlib.suppress(RuntimeError):
                self._transport.write(frames.pack_reset(_STREAM, frames.CANCEL))
            self._end(StatusCode.CANCELLED, "the call was cancelled")

    @property
    def _sendable(self) -> int:
        """The number of bytes that a frame may have now."""
        return min(self._connection_window, self._stream_window, self._frame_size)

    def _send_rest(self) -> None:
        while self._unsent and (size := min(self._sendable, len(self._unsent))) > 0:
            self._write(bytes(self._unsent[:size]))
            del self._unsent[:size]
        if not self._unsent:
            self._end_sending()

    def _end_sending(self) -> None:
        """What is due when nothing is unsent."""
        if self._is_half_closed and not self._unsent:
            self._is_half_closed = False
            self._transport.write(frames.pack_frame(frames.DATA, frames.END_STREAM, _STREAM))
        self._wake_sender()

    def _wake_sender(self) -> None:
        if self._sent is not None:
            self._sent.set()
            self._sent = None

    def _write(self, data: bytes) -> None:
        self._connection_window -= len(data)
        self._stream_window -= len(data)
        self._transport.write(frames.pack_frame(frames.DATA, 0, _STREAM, data))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop have the methods, not the class.
        self._transport = cast(asyncio.WriteTransport, transport)
        is_secure = transport.get_extra_info("ssl_object") is not None
        headers = [
            (":method", "POST"),
            (":scheme", "https" if is_secure else "http"),
            (":path", self._path),
            (":authority", self._authority),
            ("te", "trailers"),  # codespell:ignore te
            ("content-type", "application/grpc"),
        ]
        settings = {
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
            frames.MAX_FRAME_SIZE: _MAX_FRAME_BYTES,
        }
        self._transport.write(
            frames.PREFACE
            + frames.pack_settings(settings)
            + frames.pack_window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
            + pack_headers(_STREAM, Encoder().encode(headers), ends_stream=False)
        )
        if self._keep_alive is not None:
            loop = asyncio.get_running_loop()
            self._received_at = loop.time()
            self._timer = loop.call_later(self._keep_alive.after_s, self._ping, self._keep_alive)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._wake_sender()

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._received_at = asyncio.get_running_loop().time()
        try:
            if self._frames.is_empty and self._headers.is_empty:
                data = self._receive_whole(data)
            for frame in self._frames.feed(data) if data else ():
                # Frames behind the end are of no interest.
                if self.ended is None:
                    self._receive(frame)
        except ProtocolError as error:
            self._end(StatusCode.INTERNAL, str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(StatusCode.UNAVAILABLE, str(error or "the connection was closed"))

    def _end(self, code: StatusCode, details: str, packed_status: bytes = b"") -> None:
        """End the call; the first reason is kept."""
        if self.ended is None:
            self.ended = CallEnded(code, details, packed_status)
            if self._timer is not None:
                self._timer.cancel()
            self._transport.close()
            self._wake_sender()
            self._on_end(self.ended)

    def _ping(self, keep_alive: KeepAlive) -> None:
        """Send a ping if the peer has been silent, and see later whether it still is."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        ping_at = self._received_at + keep_alive.after_s
        if ping_at > now:
            self._timer = loop.call_at(ping_at, self._ping, keep_alive)
            return
        try:
            self._transport.write(frames.pack_frame(frames.PING, 0, 0, _PING))
        except RuntimeError:
            # If opening a connection is cancelled just when it is made, uvloop closes it and does
            # not call connection_lost.
            self._end(StatusCode.UNAVAILABLE, "the connection was closed")
        else:
            end_at = now + keep_alive.within_s
            self._timer = loop.call_at(end_at, self._end_if_silent, keep_alive, now, end_at)

    def _end_if_silent(self, keep_alive: KeepAlive, pinged_at: float, end_at: float) -> None:
        # A process that was stopped itself has not read.
        is_late = asyncio.get_running_loop().time() - end_at > _LATE_S
        if self._received_at >= pinged_at or is_late:
            self._ping(keep_alive)
        else:
            silent_s = keep_alive.after_s + keep_alive.within_s
            self._end(StatusCode.UNAVAILABLE, f"the peer was silent for {silent_s:g} s")
            # A connection that is only closed would wait for the peer to take what was sent.
            self._transport.abort()

    # Receiving

    def _receive_whole(self, data: bytes) -> bytes:
        """Receive what a step consists of, frames with one whole message and updates of windows,
        without objects for them. Return the rest."""
        start = 0
        while self.ended is None and len(data) - start >= _FRAME_HEADER.size:
            word, flags, stream = _FRAME_HEADER.unpack_from(data, start)
            first = start + _FRAME_HEADER.size
            behind = first + (word >> 8)
            kind = word & 0xFF
            if behind > len(data):
                break
            if kind == _DATA and not flags and self._messages.is_whole(data, first, behind):
                self._count_received(behind - first)
                self._on_message(data[first + PREFIX.size : behind])
            elif kind == _WINDOW_UPDATE and behind - first == _U32.size:
                self._raise_window(stream, _U32.unpack_from(data, first)[0] & frames.MAX_WINDOW)
            else:
                break
            start = behind
        return data[start:] if start else data

    def _receive(self, frame: Frame) -> None:
        self._headers.check_order(frame)
        match frame.kind:
            case frames.DATA:
                self._receive_data(frame)
            case frames.HEADERS | frames.CONTINUATION:
                if headers := self._headers.feed(frame):
                    self._receive_headers(headers)
            case frames.WINDOW_UPDATE:
                self._raise_window(frame.stream, frame.number)
            case frames.SETTINGS:
                self._receive_settings(frame)
            case frames.PING:
                if not frame.flags & frames.ACK:
                    self._transport.write(
                        frames.pack_frame(frames.PING, frames.ACK, 0, frame.payload)
                    )
            case frames.RST_STREAM:
                self._end(code_of_reset(frame.code), f"the stream was reset ({frame.code})")
            case frames.GOAWAY:
                # A peer that shuts down lets the call end by itself, unless it does not know it.
                if frame.number < _STREAM:
                    self._end(StatusCode.UNAVAILABLE, "the connection is being closed")
            case frames.PUSH_PROMISE:
                raise ProtocolError("pushes are disabled")

    def _receive_data(self, frame: Frame) -> None:
        self._count_received(len(frame.payload))
        for message in self._messages.feed(frame.content):
            if self.ended is None:
                self._on_message(message)
        if frame.flags & frames.END_STREAM:
            raise ProtocolError("the stream ends without a status")

    def _count_received(self, num_bytes: int) -> None:
        """Raise the windows again after some received bytes."""
        self._num_received += num_bytes
        if self._num_received >= _WINDOW_STEP:
            increment, self._num_received = self._num_received, 0
            self._transport.write(
                frames.pack_window_update(0, increment)
                + frames.pack_window_update(_STREAM, increment)
            )

    def _receive_headers(self, headers: Headers) -> None:
        if (status := headers.fields.get(b":status", b"200")) != b"200":
            raise ProtocolError(f"the HTTP status is {status!r}")
        if headers.ends_stream:
            self._end(*status_of(headers.fields))

    def _raise_window(self, stream: int, increment: int) -> None:
        if stream == 0:
            self._connection_window += increment
        else:
            self._stream_window += increment
        if self._unsent:
            self._send_rest()

    def _receive_settings(self, frame: Frame) -> None:
        if frame.flags & frames.ACK:
            return
        settings = frames.unpack_settings(frame)
        initial_window = settings.get(frames.INITIAL_WINDOW_SIZE, self._initial_window)
        self._stream_window += initial_window - self._initial_window
        self._initial_window = initial_window
        self._frame_size = settings.get(frames.MAX_FRAME_SIZE, self._frame_size)
        self._transport.write(frames.pack_frame(frames.SETTINGS, frames.ACK, 0))
        self._send_rest()

"""What a server sends over one connection: frames, as far as the peer and the socket take them."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from hpack import Encoder

from quire.service.http2 import frames
from quire.service.http2.frames import ProtocolError
from quire.service.http2.headers import pack_headers
from quire.service.http2.messages import pack_message

# Of the frames that are sent, so that no stream waits for the whole of a large one.
_MAX_FRAME_BYTES: Final = 2**16
# The least that a peer may set as the largest frame.
_MIN_FRAME_BYTES: Final = frames.DEFAULT_FRAME_SIZE
_MAX_TABLE_BYTES: Final = 4096
# Of frames that are sent together.
_MAX_TOGETHER_BYTES: Final = 2**16
# Frames that are no messages, such as acknowledgements, wait for no window. A peer that causes
# more of them and reads none is disconnected.
_MAX_UNREAD_BYTES: Final = 2**21


class Output:
    """The sending side of a connection."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        # What messages may have together until the peer raises it.
        self.window = frames.DEFAULT_WINDOW
        self.frame_size = frames.DEFAULT_FRAME_SIZE
        # Whether the socket takes no more now.
        self.is_paused = False
        # Of this connection alone; those of unix sockets have no addresses.
        self.peer = str(transport.get_extra_info("peername") or f"unix:{id(self)}")
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # Frames of this iteration of the loop.
        self._written: list[bytes] = []
        self._num_written = 0
        self._has_ended = False
        self._encoder = Encoder()
        self._initial_window = frames.DEFAULT_WINDOW
        self._streams: dict[int, OutputStream] = {}
        # Streams with something unsent that their own windows permit, in the order of sending.
        self._waiting: OrderedDict[OutputStream, None] = OrderedDict()

    def open_stream(self, number: int) -> "OutputStream":
        stream = OutputStream(self, number, self._initial_window)
        self._streams[number] = stream
        return stream

    def forget(self, number: int) -> None:
        """The stream has ended."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            # A peer that never raises the connection's window may begin any number of them.
            self._waiting.pop(stream, None)

    def write(self, data: bytes) -> None:
        """Send frames, in this iteration of the loop together with all others: after a step each of
        many streams has one, and they would cost a call of the system each."""
        if not self._written:
            self._loop.call_soon(self.flush)
        self._written.append(data)
        self._num_written += len(data)
        if self._num_written >= _MAX_TOGETHER_BYTES:
            # The socket says now whether it takes more.
            self.flush()

    def flush(self) -> None:
        """Send what was written; no effect if the connection is closed, or after `end`."""
        if self._written:
            data = b"".join(self._written)
            self._written.clear()
            self._num_written = 0
            if not self._has_ended and not self._transport.is_closing():
                self._transport.write(data)

    def end(self) -> None:
        """Send what was written, and that nothing follows. The client closes the connection then:
        if it was closed here, what the client still sends would reset it, and what it has not read
        yet would be lost."""
        self.flush()
        self._has_ended = True
        if not self._transport.can_write_eof():
            # TLS has an exchange of its own for it.
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:
            # The client has gone, which asyncio has not noticed yet.
            self._transport.abort()

    def respond(self, data: bytes) -> None:
        """Send frames that the peer has asked for. ProtocolError if it reads none."""
        self.check_read()
        self.write(data)

    def check_read(self) -> None:
        """ProtocolError if the peer does not read what is sent."""
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            raise ProtocolError("it reads nothing")

    def pack_fields(
        self, stream: int, fields: Iterable[tuple[str, str]], ends_stream: bool
    ) -> bytes:
        """The frames of headers. They must be sent in the order of these calls."""
        return pack_headers(stream, self._encoder.encode(fields), ends_stream)

    def apply(self, settings: Mapping[int, int]) -> None:
        """Apply and acknowledge the peer's settings. ProtocolError if they are invalid."""
        initial_window = settings.get(frames.INITIAL_WINDOW_SIZE, self._initial_window)
        frame_size = settings.get(frames.MAX_FRAME_SIZE, self.frame_size)
        if initial_window > frames.MAX_WINDOW or frame_size < _MIN_FRAME_BYTES:
            raise ProtocolError("a setting is out of range")
        if increment := initial_window - self._initial_window:
            for stream in self._streams.values():
                stream.raise_window(increment)
        self._initial_window = initial_window
        self.frame_size = min(frame_size, _MAX_FRAME_BYTES)
        if frames.HEADER_TABLE_SIZE in settings:
            self._resize_table(min(settings[frames.HEADER_TABLE_SIZE], _MAX_TABLE_BYTES))
        # First: the peer counts by the new windows from the acknowledgement on.
        self.respond(frames.pack_frame(frames.SETTINGS, frames.ACK, 0))
        self.send_rest()

    def _resize_table(self, size: int) -> None:
        """Change the size of the table of header fields, which the next block of headers names."""
        encoder = self._encoder
        # hpack forgets to name a change that is followed by one to the same size.
        if size != encoder.header_table_size:
            encoder.header_table_size = size
            # It keeps all of them; the peer needs the least and the last (RFC 7541, section 4.2).
            if len(changes := encoder.table_size_changes) > 2:
                changes[:] = [min(changes), size]

    def raise_window(self, stream: int, increment: int) -> None:
        """Apply an update of a window. ProtocolError if it is invalid."""
        if not increment:
            raise ProtocolError("a window is raised by nothing")
        if stream == 0:
            self.window = _raised(self.window, increment)
        elif found := self._streams.get(stream):
            found.raise_window(increment)
        self.send_rest()

    def wait(self, stream: "OutputStream") -> None:
        """Send the rest of a stream, a frame at a time, alternately with others. One that waits
        already keeps its place."""
        self._waiting[stream] = None

    def send_rest(self) -> None:
        """Send what has waited, a frame of each stream after another."""
        waiting = self._waiting
        while waiting and self.window > 0 and not self.is_paused:
            stream, _ = waiting.popitem(last=False)
            stream.send_frame()


class OutputStream:
    """The messages of one stream."""

    def __init__(self, output: Output, number: int, window: int) -> None:
        self._output = output
        self._number = number
        self._window = window
        self._unsent = bytearray()
        # Set when nothing is unsent any more; None without a handler that waits.
        self._sent: asyncio.Event | None = None

    def send(self, message: bytes, before: bytes = b"") -> bool:
        """Send a message, after other frames; return whether all of it has been sent."""
        output, data = self._output, pack_message(message)
        size = len(data)
        if not self._unsent and not output.is_paused and size <= self._sendable:
            self._window -= size
            output.window -= size
            output.write(before + frames.pack_frame(frames.DATA, 0, self._number, data))
            return True
        if before:
            output.write(before)
        self._unsent += data
        self._wait()
        output.send_rest()
        return not self._unsent

    async def wait_sent(self, silence_s: float) -> bool:
        """Wait until all messages have been sent. False if the peer takes nothing for so long."""
        while num_unsent := len(self._unsent):
            self._sent = self._sent or asyncio.Event()
            try:
                async with asyncio.timeout(silence_s):
                    await self._sent.wait()
            except TimeoutError:
                if len(self._unsent) == num_unsent:
                    return False
        return True

    def drop(self) -> None:
        """Send nothing more."""
        self._unsent.clear()
        self._wake()

    def raise_window(self, increment: int) -> None:
        self._window = _raised(self._window, increment)
        self._wait()

    def send_frame(self) -> None:
        """Send a frame, as far as the windows permit one."""
        size = min(self._sendable, len(self._unsent))
        if size <= 0:
            return
        part = bytes(memoryview(self._unsent)[:size])
        del self._unsent[:size]
        self._window -= size
        self._output.window -= size
        self._output.write(frames.pack_frame(frames.DATA, 0, self._number, part))
        if self._unsent:
            self._wait()
        else:
            self._wake()

    def _wait(self) -> None:
        if self._unsent and self._window > 0:
            self._output.wait(self)

    @property
    def _sendable(self) -> int:
        """The number of bytes that a frame may have now."""
        return min(self._window, self._output.window, self._output.frame_size)

    def _wake(self) -> None:
        if self._sent is not None:
            self._sent.set()
            self._sent = None


def _raised(window: int, increment: int) -> int:
    if window + increment > frames.MAX_WINDOW:
        raise ProtocolError("a window is too large")
    return window + increment

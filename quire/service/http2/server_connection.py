"""One connection of a client to the server."""

import asyncio
import random
import re
import time
from collections.abc import Callable
from typing import Final, cast

import structlog
from grpc import StatusCode

from quire.service.http2 import frames, greeting
from quire.service.http2.empty_frames import EmptyFrames
from quire.service.http2.ended_connections import reset_calls
from quire.service.http2.frames import Frame, FrameReader, ProtocolError
from quire.service.http2.greeting import MAX_FRAME_BYTES
from quire.service.http2.headers import HeaderBlocks, Headers
from quire.service.http2.incomplete import Incomplete
from quire.service.http2.limits import Limits
from quire.service.http2.output import Output
from quire.service.http2.server_call import FindHandler, ServerCall
from quire.service.http2.unread import UnreadMessages

log = structlog.get_logger()

# Received bytes after which the connection's window is raised to its maximum again. Windows of
# streams bound what is received.
_WINDOW_STEP: Final = 2**24
# A client that was silent for so long is sent a ping, and disconnected without a response.
KEEPALIVE_S: Final = 20.0
PING_TIMEOUT_S: Final = 5.0
# A client has so long to close its connection after the last call.
LINGER_S: Final = 5.0
_PING_BYTES: Final = 8
# The ping whose response shows that the client has received the GOAWAY before it.
_LAST_PING: Final = b"the last"
_AGE_JITTER: Final = 0.1
# Of gRPC, in whatever format its messages are; not that of gRPC-Web.
_CONTENT_TYPE: Final = re.compile(rb"application/grpc(?:[+;]|$)")
# The time slice of a client: frames are received for so long at a time, so that a client that
# floods the server holds up no other.
_MAX_SLICE_S: Final = 0.001


class ServerConnection(asyncio.Protocol):
    """Gives frames to the calls that they belong to. A client that breaks the protocol is
    disconnected."""

    def __init__(
        self,
        find_handler: FindHandler,
        limits: Limits,
        unread: UnreadMessages,
        on_opened: Callable[["ServerConnection"], None],
        on_closed: Callable[["ServerConnection"], None],
    ) -> None:
        """`unread`: of the server. `on_closed` is called when it is closed and all of its handlers
        have ended."""
        self._find_handler = find_handler
        self._limits, self._unread = limits, unread
        self._on_opened, self._on_closed = on_opened, on_closed
        # What is missing of the preface.
        self._preface = frames.PREFACE
        self._frames, self._headers = FrameReader(MAX_FRAME_BYTES), HeaderBlocks()
        self._incomplete = Incomplete(self._frames, self._headers)
        self._num_received = self._last_stream = 0
        self._calls: dict[int, ServerCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = self._is_lost = self._has_greeted = False
        # Whether received frames wait for the next time slice.
        self._is_waiting = False
        self._empty_frames = EmptyFrames(limits.max_calls, self._calls)
        self._transport: asyncio.Transport
        self._output: Output
        self._timer: asyncio.TimerHandle | None = None
        self._retirement: asyncio.TimerHandle | None = None
        # When the client has last sent something, by the loop's clock.
        self._last_received_at = 0.0

    @property
    def is_used(self) -> bool:
        """Whether a handler has not returned."""
        return not all(call.has_returned for call in self._calls.values())

    def drain(self) -> None:
        """Accept no further calls, and close the connection when those in progress have ended."""
        if not self._is_closing:
            self._is_closing = True
            self._greet()
            self._output.write(frames.pack_goaway(self._last_stream, frames.NO_ERROR))
            self._close_if_idle()

    def _retire(self) -> None:
        """Name the end to the client, and drain when it has responded: calls that it sends before
        are served."""
        if not self._is_closing:
            self._greet()
            ping = frames.pack_frame(frames.PING, 0, 0, _LAST_PING)
            self._output.write(frames.pack_goaway(frames.MAX_STREAM, frames.NO_ERROR) + ping)
            self._retire_at(PING_TIMEOUT_S, self.drain)

    def abort(self) -> None:
        """Close the connection at once."""
        self._output.flush()
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop have the methods, not the class.
        self._transport = cast(asyncio.Transport, transport)
        self._output = Output(self._transport)
        self._last_received_at = asyncio.get_running_loop().time()
        self._watch()
        if (age_s := self._limits.max_age_s) is not None:
            # Clients that connected together do not all connect again at the same time.
            age_s *= random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
            self._retire_at(age_s, self._retire)
        self._on_opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._timer, self._retirement):
            if timer is not None:
                timer.cancel()
        self._is_lost = True
        reset_calls(self._calls)
        self._report_if_closed()

    def pause_writing(self) -> None:
        self._output.is_paused = True

    def resume_writing(self) -> None:
        self._output.is_paused = False
        self._output.send_rest()

    def data_received(self, data: bytes) -> None:
        if self._preface:
            if self._is_closing:
                return
            try:
                data = self._receive_preface(data)
            except ProtocolError as error:
                self._refuse(error)
        if data and not self._preface:
            self._frames.add(data)
            if not self._is_waiting:
                self._receive_slice()

    def _receive_slice(self) -> None:
        """Receive frames for a while; what is left then waits until other clients were served."""
        if self._is_lost:
            return
        self._last_received_at = asyncio.get_running_loop().time()
        ends_at = time.monotonic() + _MAX_SLICE_S
        was_waiting, self._is_waiting = self._is_waiting, False
        try:
            while (frame := self._frames.take()) is not None:
                self._receive(frame)
                if time.monotonic() >= ends_at:
                    self._is_waiting = True
                    break
        except ProtocolError as error:
            self._refuse(error)
        if self._is_waiting:
            asyncio.get_running_loop().call_soon(self._receive_slice)
        if self._is_waiting != was_waiting and not self._transport.is_closing():
            if self._is_waiting:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _greet(self) -> None:
        """Send the settings, once, and not to clients of HTTP/1: they could read nothing more."""
        if not self._has_greeted:
            self._has_greeted = True
            self._output.write(greeting.settings(self._limits))

    # Its end

    def _refuse(self, why: ProtocolError) -> None:
        if self._transport.is_closing():
            return
        self._log_refusal(str(why))
        self._is_closing = True
        self._greet()
        self._output.write(frames.pack_goaway(self._last_stream, why.goaway_code))
        self._output.flush()
        self._transport.close()

    def _log_refusal(self, reason: str) -> None:
        peer = self._transport.get_extra_info("peername") or "a unix socket"
        log.info("a connection was refused", peer=str(peer), reason=reason)

    def _refuse_http1(self, response: bytes) -> None:
        self._log_refusal("it speaks HTTP/1")
        self._has_greeted = self._is_closing = True
        self._output.write(response)
        self._close_if_idle()

    def _report_if_closed(self) -> None:
        if self._is_lost and not self._tasks:
            self._on_closed(self)

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._calls and not self._transport.is_closing():
            self._output.end()
            self._retire_at(LINGER_S, self._transport.abort)

    def _retire_at(self, delay_s: float, step: Callable[[], None]) -> None:
        """Take the next step towards the end of the connection in some seconds."""
        if self._retirement is not None:
            self._retirement.cancel()
        self._retirement = asyncio.get_running_loop().call_later(delay_s, step)

    def _watch(self) -> None:
        """Look after the client when it may have been silent for too long, or in between."""
        loop = asyncio.get_running_loop()
        due_at = self._last_received_at + KEEPALIVE_S
        if self._incomplete.is_overdue(loop.time()):
            self._log_refusal("a frame or a block of headers takes too long")
            self._transport.abort()
        elif loop.time() < due_at:
            self._timer = loop.call_at(due_at, self._watch)
        elif self._preface:
            self._transport.abort()
        else:
            self._output.write(frames.pack_frame(frames.PING, 0, 0, bytes(_PING_BYTES)))
            self._timer = loop.call_later(PING_TIMEOUT_S, self._end_silence, loop.time())

    def _end_silence(self, asked_at: float) -> None:
        if self._last_received_at < asked_at:
            self._transport.abort()
        else:
            self._watch()

    # Receiving

    def _receive_preface(self, data: bytes) -> bytes:
        """Return what follows the preface. ProtocolError for anything else."""
        part = data[: len(self._preface)]
        if not self._preface.startswith(part):
            if response := greeting.response_to(data):
                self._refuse_http1(response)
                return b""
            raise ProtocolError("it does not speak HTTP/2")
        self._greet()
        self._preface = self._preface[len(part) :]
        return data[len(part) :]

    def _receive(self, frame: Frame) -> None:
        self._headers.check_order(frame)
        self._empty_frames.count(frame, self._last_received_at)
        match frame.kind:
            case frames.DATA:
                self._receive_data(frame)
            case frames.HEADERS | frames.CONTINUATION:
                if headers := self._headers.feed(frame):
                    self._receive_headers(headers)
            case frames.WINDOW_UPDATE:
                self._check_begun(frame.stream)
                self._output.raise_window(frame.stream, frame.number)
            case frames.SETTINGS:
                if not frame.flags & frames.ACK:
                    self._output.apply(frames.unpack_settings(frame))
            case frames.PING:
                self._receive_ping(frame)
            case frames.RST_STREAM:
                self._check_begun(frame.stream or self._last_stream + 1)
                if call := self._calls.get(frame.stream):
                    call.reset()
            case frames.PUSH_PROMISE:
                raise ProtocolError("a client pushes")

    def _receive_ping(self, frame: Frame) -> None:
        if len(frame.payload) != _PING_BYTES:
            raise ProtocolError("a ping has a wrong length")
        if not frame.flags & frames.ACK:
            self._output.respond(frames.pack_frame(frames.PING, frames.ACK, 0, frame.payload))
        elif frame.payload == _LAST_PING and self._retirement is not None:
            self.drain()

    def _receive_data(self, frame: Frame) -> None:
        self._check_begun(frame.stream or self._last_stream + 1)
        self._num_received += len(frame.payload)
        if self._num_received >= _WINDOW_STEP:
            self._output.write(frames.pack_window_update(0, self._num_received))
            self._num_received = 0
        # Data of a call that has ended here may be on its way.
        call = self._calls.get(frame.stream)
        if call is not None:
            call.receive(frame.content, len(frame.payload))
            if frame.flags & frames.END_STREAM:
                call.receive_end()

    def _check_begun(self, stream: int) -> None:
        if stream > self._last_stream:
            raise ProtocolError("a frame of a stream that has not begun")

    def _receive_headers(self, headers: Headers) -> None:
        stream = headers.stream
        if call := self._calls.get(stream):
            # Trailers, which clients of gRPC do not send.
            if not headers.ends_stream:
                raise ProtocolError("a stream begins twice")
            call.receive_end()
        elif stream > self._last_stream and stream % 2:
            self._last_stream = stream
            # The status of a call waits for no window.
            self._output.check_read()
            if self._is_closing or len(self._tasks) >= self._limits.max_calls:
                self._output.respond(frames.pack_reset(stream, frames.REFUSED_STREAM))
            else:
                self._start_call(headers)
        elif not stream % 2:
            raise ProtocolError("a stream has an even number")

    def _start_call(self, headers: Headers) -> None:
        fields, number = headers.fields, headers.stream
        if not _CONTENT_TYPE.match(fields.get(b"content-type", b"")):
            self._refuse_request(headers, [(":status", "415")])
            return
        if fields.get(b":method") != b"POST":
            self._refuse_request(headers, [(":status", "405"), ("allow", "POST")])
            return
        max_bytes = self._limits.max_message_bytes
        call = ServerCall(headers, self._output, max_bytes, self._unread, self._call_ended)
        self._calls[number] = call
        if headers.ends_stream:
            call.receive_end()
        if (excess := headers.excess) is not None:
            call.fail(StatusCode.RESOURCE_EXHAUSTED, excess)
            return
        task = call.start(self._find_handler)
        self._tasks.add(task)
        task.add_done_callback(self._handler_ended)

    def _refuse_request(self, headers: Headers, response: list[tuple[str, str]]) -> None:
        """Respond to a request that is not one of gRPC."""
        # Without a reset, which hides the response from curl; what the client sends is dropped.
        self._output.write(self._output.pack_fields(headers.stream, response, ends_stream=True))

    def _handler_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._report_if_closed()

    def _call_ended(self, number: int) -> None:
        del self._calls[number]
        self._output.forget(number)
        self._close_if_idle()

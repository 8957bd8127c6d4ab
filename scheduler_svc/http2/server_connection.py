"""One connection of a client to the server."""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import structlog
from grpc import StatusCode

from scheduler_svc.http2 import frames
from scheduler_svc.http2.frames import Frame, FrameReader, ProtocolError
from scheduler_svc.http2.headers import HeaderBlocks, Headers
from scheduler_svc.http2.output import Output
from scheduler_svc.http2.server_call import INITIAL_WINDOW, Handler, ServerCall

log = structlog.get_logger()

_MAX_FRAME_BYTES: Final = 2**20
# Calls at once, those included that are cancelled and have not ended.
_MAX_CALLS: Final = 1000
# Received bytes after which the connection's window is raised to its maximum again. Windows of
# streams bound what is received.
_WINDOW_STEP: Final = 2**24
# A client that was silent for so long is sent a ping, and disconnected without a response.
KEEPALIVE_S: Final = 20.0
PING_TIMEOUT_S: Final = 5.0
_PING_BYTES: Final = 8


class ServerConnection(asyncio.Protocol):
    """Gives frames to the calls that they belong to. A client that breaks the protocol is
    disconnected."""

    def __init__(
        self,
        handler_of: Callable[[str], "Handler | None"],
        max_message_bytes: int,
        on_opened: Callable[["ServerConnection"], None],
        on_closed: Callable[["ServerConnection"], None],
    ) -> None:
        """`handler_of` finds a handler by its path, /package.Service/Method. `on_closed` is called
        when the connection is closed and all of its handlers have ended."""
        self._handler_of = handler_of
        self._max_message_bytes = max_message_bytes
        self._on_opened, self._on_closed = on_opened, on_closed
        # What is missing of the preface.
        self._preface = frames.PREFACE
        self._frames = FrameReader(_MAX_FRAME_BYTES)
        self._headers = HeaderBlocks()
        self._num_received = 0
        self._last_stream = 0
        self._calls: dict[int, ServerCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = self._is_lost = False
        self._transport: asyncio.WriteTransport
        self._output: Output
        self._timer: asyncio.TimerHandle | None = None
        # When it has sent something last, by the loop's clock.
        self._last_received_at = 0.0

    def drain(self) -> None:
        """Accept no further calls, and close the connection when those in progress have ended."""
        if not self._is_closing:
            self._is_closing = True
            self._output.write(frames.pack_goaway(self._last_stream, frames.NO_ERROR))
            self._close_if_idle()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Transports of uvloop have the methods, not the class.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._output = Output(self._transport)
        settings = {
            frames.MAX_CONCURRENT_STREAMS: _MAX_CALLS,
            frames.INITIAL_WINDOW_SIZE: INITIAL_WINDOW,
            frames.MAX_FRAME_SIZE: _MAX_FRAME_BYTES,
        }
        self._output.write(
            frames.pack_settings(settings)
            + frames.pack_window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
        )
        self._last_received_at = asyncio.get_running_loop().time()
        self._watch()
        self._on_opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for call in list(self._calls.values()):
            call.reset()
        self._is_lost = True
        self._report_if_closed()

    def pause_writing(self) -> None:
        self._output.is_paused = True

    def resume_writing(self) -> None:
        self._output.is_paused = False
        self._output.send_rest()

    def data_received(self, data: bytes) -> None:
        self._last_received_at = asyncio.get_running_loop().time()
        try:
            if self._preface:
                data = self._receive_preface(data)
            for frame in self._frames.feed(data):
                self._receive(frame)
        except ProtocolError as error:
            self._refuse(error)

    # Its end

    def _refuse(self, why: ProtocolError) -> None:
        if self._transport.is_closing():
            return
        peer = self._transport.get_extra_info("peername") or "a unix socket"
        log.info("a connection was refused", peer=str(peer), reason=str(why))
        self._is_closing = True
        self._output.write(frames.pack_goaway(self._last_stream, frames.PROTOCOL_ERROR))
        self._transport.close()

    def _report_if_closed(self) -> None:
        if self._is_lost and not self._tasks:
            self._on_closed(self)

    def _close_if_idle(self) -> None:
        if self._is_closing and not self._calls:
            self._transport.close()

    def _watch(self) -> None:
        """Look after the client when it may have been silent for too long."""
        loop = asyncio.get_running_loop()
        due_at = self._last_received_at + KEEPALIVE_S
        if loop.time() < due_at:
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
            raise ProtocolError("it does not speak HTTP/2")
        self._preface = self._preface[len(part) :]
        return data[len(part) :]

    def _receive(self, frame: Frame) -> None:
        self._headers.check_order(frame)
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
            if self._is_closing or len(self._tasks) >= _MAX_CALLS:
                self._output.respond(frames.pack_reset(stream, frames.REFUSED_STREAM))
            else:
                self._start_call(headers)
        elif not stream % 2:
            raise ProtocolError("a stream has an even number")

    def _start_call(self, headers: Headers) -> None:
        fields, number = headers.fields, headers.stream
        if not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            refusal = self._output.pack_fields(number, [(":status", "415")], ends_stream=True)
            self._output.respond(refusal)
            return
        call = ServerCall(number, self._output, self._max_message_bytes, self._call_ended)
        self._calls[number] = call
        if headers.ends_stream:
            call.receive_end()
        path = fields.get(b":path", b"").decode(errors="replace")
        handler = self._handler_of(path)
        if handler is None:
            call.fail(StatusCode.UNIMPLEMENTED, f"there is no method {path}")
            return
        task = call.start(handler, fields)
        self._tasks.add(task)
        task.add_done_callback(self._handler_ended)

    def _handler_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._report_if_closed()

    def _call_ended(self, number: int) -> None:
        del self._calls[number]
        self._output.forget(number)
        self._close_if_idle()

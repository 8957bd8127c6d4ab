"""One call of a client, as its handler sees it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import structlog
from grpc import StatusCode
from grpc_status import rpc_status

from quire.service.errors import RequestError
from quire.service.http2 import frames
from quire.service.http2.compression import ACCEPTED, is_known, refusal
from quire.service.http2.frames import ProtocolError
from quire.service.http2.headers import Headers, metadata_of, status_fields, timeout_s_of
from quire.service.http2.messages import MessageReader, MessageRefused
from quire.service.http2.output import Output
from quire.service.http2.unread import SILENCE_S, TAKING_S, UnreadMessages, not_sent, not_taken

log = structlog.get_logger()

# What a client may send before the handler reads it, besides the rest of one message.
INITIAL_WINDOW: Final = 2**22
# The window is raised after so many bytes.
_WINDOW_STEP: Final = 2**20
# Of an exception's text: clients refuse metadata of more than 8 KiB.
_MAX_ERROR_CHARS: Final = 1000
# A handler that never waits for its client lets others run after so many requests or responses.
_MAX_RUN: Final = 32
_RESPONSE: Final = [
    (":status", "200"),
    ("content-type", "application/grpc"),
    ("grpc-accept-encoding", ACCEPTED),
]
# Of the path of an unknown method, in a refusal.
_MAX_PATH_CHARS: Final = 200

# Generic in the stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
# Finds a handler by its path, /package.Service/Method, and the call's metadata, if it needs them.
FindHandler: TypeAlias = Callable[[str, Callable[[], Metadata]], Awaitable["Handler | None"]]


class ServerCall:
    """Receives the frames of a call's stream, and is the context that its handler gets: of
    `grpc.aio.ServicerContext` it has what the services use."""

    def __init__(
        self,
        headers: Headers,
        output: Output,
        max_message_bytes: int,
        unread: UnreadMessages,
        on_end: Callable[[int], None],
    ) -> None:
        """`unread`: of the server. `on_end` is called with the number of the stream when the call
        ends."""
        number = headers.stream
        self._headers = headers
        # None until it is needed; the headers have no pairs then.
        self._metadata: Metadata | None = None
        self._number = number
        self._output = output
        self._stream = output.open_stream(number)
        self._on_end = on_end
        # Whether only the response has still to be received.
        self.has_returned = False
        self._has_ended = False
        self._has_responded = False
        self._has_all_requests = False
        self._changed = asyncio.Event()
        # What the handler has not read.
        self._unread = unread
        self._messages = MessageReader(max_message_bytes)
        # Of a request that is being decompressed.
        self._num_compressed = 0
        # The compression that the client has named.
        self._encoding = "identity"
        # Bytes that were received, and those that the client was allowed to send beyond its first
        # window.
        self._num_received = self._num_allowed = 0
        self._deserialize: Callable[[bytes], Any] = bytes
        self._serialize: Callable[[Any], bytes] = bytes
        self._num_read = self._num_written = 0
        self._task: asyncio.Task[None] | None = None
        # By the loop's clock; None without one.
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        # The status; None until the end.
        self._code: StatusCode | None = None

    # The connection's side

    def start(self, find: FindHandler) -> asyncio.Task[None]:
        """Run the handler, for at most the time that the client's headers allow."""
        fields = self._headers.fields
        self._encoding = fields.get(b"grpc-encoding", b"identity").decode(errors="replace")
        self._messages.allows_compressed = is_known(self._encoding)
        self._task = asyncio.create_task(self._run(find))
        if (timeout_s := timeout_s_of(fields)) is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + timeout_s
            self._timer = loop.call_at(self._deadline, self._expire)
        return self._task

    def receive(self, content: bytes, num_bytes: int) -> None:
        """Receive data that has `num_bytes` with its padding. ProtocolError if the client was not
        allowed to send it."""
        self._num_received += num_bytes
        if self._num_received > INITIAL_WINDOW + self._num_allowed or self._has_all_requests:
            raise ProtocolError("data was sent beyond the window or the end")
        self._messages.add(content)
        self._unread.set(self, self._messages.num_bytes + self._num_compressed)
        if not self._has_ended:
            self._check_next()

    def receive_end(self) -> None:
        """The client sends nothing more."""
        self._has_all_requests = True
        self._changed.set()
        if not self._has_ended:
            self._check_next()

    def fail(self, code: StatusCode, message: str) -> None:
        """End the call from outside of its handler."""
        self._end(code, message)
        self._cancel()

    def refuse(self, error: RequestError) -> None:
        """End the call from outside of its handler, with the details of an error."""
        rich = rpc_status.to_status(error.to_status())
        self._end(rich.code, rich.details, rich.trailing_metadata)
        self._cancel()

    def reset(self) -> None:
        """The client has cancelled the call, or the connection is closed."""
        self._finish()
        self._cancel()

    # The handler's side

    def invocation_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = metadata_of(self._headers)
            self._headers = self._headers._replace(pairs=())
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    def peer(self) -> str:
        """Stands for the client's connection."""
        return self._output.peer

    def code(self) -> StatusCode | None:
        """The status of the call; None until its end."""
        return self._code

    async def write(self, response: Any) -> None:
        """Send a response; wait until the client may receive all of it. CancelledError if the call
        has ended."""
        if self._has_ended:
            raise asyncio.CancelledError
        message = self._serialize(response)
        # Once they are packed, they have to be sent.
        before = b"" if self._has_responded else self._response_headers()
        if not self._stream.send(message, before) and not await self._stream.wait_sent(TAKING_S):
            self.refuse(not_taken(TAKING_S))
        self._num_written += 1
        if self._num_written % _MAX_RUN == 0:
            await asyncio.sleep(0)

    async def abort(
        self, code: StatusCode, details: str = "", trailing_metadata: Iterable[Any] = ()
    ) -> NoReturn:
        """End the call with this status; raises AbortError. CancelledError if it has ended."""
        if self._has_ended:
            raise asyncio.CancelledError
        self._end(code, details, trailing_metadata)
        raise grpc.aio.AbortError

    async def _read(self) -> AsyncIterator[Any]:
        """The requests, as the client sends them."""
        while (request := await self._next()) is not None:
            yield await self._parsed(request)

    def _is_next_known(self) -> bool:
        """Whether the next request is complete, or there is none."""
        return self._messages.has_next() or self._has_all_requests or self._has_ended

    async def _wait_for_next(self, silence_s: float | None) -> None:
        while not self._is_next_known():
            self._changed.clear()
            num_received = self._num_received
            try:
                async with asyncio.timeout(silence_s):
                    await self._changed.wait()
            except TimeoutError:
                if self._num_received == num_received:
                    self.refuse(not_sent(silence_s))

    async def _next(self, silence_s: float | None = None) -> bytes | None:
        """The next request; None behind the last one. The call ends after such a silence."""
        if not self._is_next_known():
            with self._unread.waiting(self):
                await self._wait_for_next(silence_s)
        if not self._messages.has_next():
            return None
        is_compressed = self._messages.is_next_compressed
        request = self._messages.take()
        assert request is not None
        self._unread.set(self, self._messages.num_bytes)
        self._check_next()
        self._num_read += 1
        if self._num_read % _MAX_RUN == 0:
            await asyncio.sleep(0)
        return await self._decompressed(request) if is_compressed else request

    async def _decompressed(self, request: bytes) -> bytes:
        max_bytes = self._messages.max_message_bytes
        self._num_compressed = len(request)
        self._unread.set(self, self._messages.num_bytes + self._num_compressed)
        try:
            return await self._unread.decompressor.decompressed(request, self._encoding, max_bytes)
        except MessageRefused as error:
            await self.abort(error.code, str(error))
        finally:
            self._num_compressed = 0
            self._unread.set(self, self._messages.num_bytes)

    async def _parsed(self, request: bytes) -> Any:
        try:
            return self._deserialize(request)
        except Exception as error:
            why = f"the request cannot be parsed: {error}"
            await self.abort(StatusCode.INTERNAL, why[:_MAX_ERROR_CHARS])

    async def _run(self, find: FindHandler) -> None:
        try:
            await self._handle(await self._found(find))
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._end(StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:
            log.exception("a call has failed")
            self._end(StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])
        else:
            self._end(StatusCode.OK, "")

    async def _found(self, find: FindHandler) -> Handler:
        path = self._headers.fields.get(b":path", b"").decode(errors="replace")
        handler = await find(path, self.invocation_metadata)
        if handler is None:
            why = f"there is no method {path[:_MAX_PATH_CHARS]}"
            await self.abort(StatusCode.UNIMPLEMENTED, why)
        self._deserialize = handler.request_deserializer or bytes
        self._serialize = handler.response_serializer or bytes
        return handler

    async def _handle(self, handler: Handler) -> None:
        method: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        if handler.request_streaming:
            responses = method(self._read(), self)
        else:
            request = await self._next(SILENCE_S)
            if request is None:
                await self.abort(StatusCode.INTERNAL, "the call has no request")
            responses = method(await self._parsed(request), self)
        if hasattr(responses, "__aiter__"):
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await self.write(response)
        else:
            response = await responses
            self.has_returned = True
            if not handler.response_streaming:
                await self.write(response)

    # Both

    def _response_headers(self) -> bytes:
        """The frames of the response's headers."""
        self._has_responded = True
        return self._output.pack_fields(self._number, _RESPONSE, ends_stream=False)

    def _end(self, code: StatusCode, message: str, trailing_metadata: Iterable[Any] = ()) -> None:
        """Send the status, unless the call has ended."""
        if self._has_ended:
            return
        self._code = code
        fields = status_fields(code, message, trailing_metadata)
        if not self._has_responded:
            fields = _RESPONSE + fields
        packed = self._output.pack_fields(self._number, fields, ends_stream=True)
        if not self._has_all_requests:
            # The client need not send the rest.
            packed += frames.pack_reset(self._number, frames.NO_ERROR)
        self._output.write(packed)
        self._finish()

    def _finish(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._stream.drop()
            self._messages.clear()
            self._unread.set(self, 0)
            self._changed.set()
            if self._timer is not None:
                self._timer.cancel()
            self._on_end(self._number)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _expire(self) -> None:
        self.fail(StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")

    def _check_next(self) -> None:
        """Look at the next message: let the handler read it, or the client send more."""
        try:
            is_complete = self._messages.has_next()
        except MessageRefused as error:
            self.fail(*refusal(error, self._encoding))
            return
        if is_complete:
            self._changed.set()
        elif self._has_all_requests and not self._messages.is_empty:
            self.fail(StatusCode.INTERNAL, "the last message is incomplete")
            return
        # An incomplete message counts as read: the handler cannot go on without the rest.
        num_unread = self._messages.num_bytes if is_complete else 0
        increment = self._num_received - num_unread - self._num_allowed
        if increment >= _WINDOW_STEP and not self._has_ended and not self._has_all_requests:
            self._num_allowed += increment
            self._output.write(frames.pack_window_update(self._number, increment))

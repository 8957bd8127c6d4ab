"""A client of one connection of the server, frame by frame."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from hpack import Decoder, Encoder

from quire.service.http2 import frames
from quire.service.http2.frames import Frame, FrameReader
from quire.service.http2.limits import Limits
from quire.service.http2.messages import pack_message
from quire.service.http2.server_connection import ServerConnection
from quire.service.http2.unread import UnreadMessages

LIMITS = Limits(max_message_bytes=1000)
_REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/Echo"),
    (":authority", "host"),
    ("content-type", "application/grpc"),
]


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.num_writes = 0
        self.is_closed = False
        self.is_read = True
        self.num_unread = 0

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data
        self.num_writes += 1

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        assert self.is_read
        self.is_read = False

    def resume_reading(self) -> None:
        assert not self.is_read
        self.is_read = True

    def get_write_buffer_size(self) -> int:
        return self.num_unread


class Peer:
    """A client of one connection, with what it has received."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        async def one(request: bytes, context: Any) -> bytes:
            return request

        async def hold(requests: AsyncIterator[bytes], context: Any) -> None:
            await asyncio.Event().wait()

        self.handlers: dict[str, Any] = {
            "/a.B/Echo": grpc.stream_stream_rpc_method_handler(echo, bytes, bytes),
            "/a.B/One": grpc.unary_unary_rpc_method_handler(one, bytes, bytes),
            "/a.B/Hold": grpc.stream_stream_rpc_method_handler(hold, bytes, bytes),
        }
        self.transport = Transport()
        self.is_gone = asyncio.Event()

        async def find(path: str, metadata: object) -> Any:
            return self.handlers.get(path)

        self.unread = UnreadMessages(limits.max_unread_bytes, limits.max_waiting_calls)
        self.connection = ServerConnection(
            find, limits, self.unread, lambda made: None, lambda lost: self.is_gone.set()
        )
        self.connection.connection_made(self.transport)
        self._encoder, self._decoder = Encoder(), Decoder()
        self._frames = FrameReader(2**24)

    def send(self, *parts: bytes) -> None:
        self.connection.data_received(b"".join(parts))

    def headers(
        self,
        stream: int = 1,
        path: str = "/a.B/Echo",
        flags: int = 0,
        method: str = "POST",
        **others: str,
    ) -> bytes:
        changed = {":path": path, ":method": method}
        fields = [(name, changed.get(name, value)) for name, value in _REQUEST]
        block = self._encoder.encode([*fields, *others.items()])
        return frames.pack_frame(frames.HEADERS, flags | frames.END_HEADERS, stream, block)

    async def received(self) -> list[Frame]:
        """The frames since the last call, when the handlers have done what they can."""
        for _ in range(10):
            await asyncio.sleep(0)
        found = self._frames.feed(bytes(self.transport.written))
        self.transport.written.clear()
        return found

    def fields(self, frame: Frame) -> dict[str, str]:
        return dict(self._decoder.decode(frame.payload))

    async def close(self) -> None:
        self.connection.connection_lost(None)
        await self.is_gone.wait()


def data(message: bytes, stream: int = 1, flags: int = 0) -> bytes:
    return frames.pack_frame(frames.DATA, flags, stream, pack_message(message))

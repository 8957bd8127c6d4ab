"""One `Connect` stream to the leader of a shard."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from quire.internal.v1 import scheduler_pb2
from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import RequestError
from quire.service.http2.call import KeepAlive, StreamCall
from quire.service.http2.call_status import CallEnded
from quire.service.http2.connect import authority, connect
from quire.service.tls import TLS, TLSError

# A leader sends its hello at once; a process that is suspended or unreachable sends none.
HELLO_TIMEOUT_S = 1.0
# A scheduler that is stopped or unreachable is noticed within two seconds.
_KEEP_ALIVE = KeepAlive(after_s=1.0, within_s=1.0)
_CONNECT = "/quire.internal.v1.SchedulerService/Connect"


class NotLeadingError(Exception):
    """A scheduler does not lead, cannot be reached, or has another protocol version."""

    def __init__(self, reason: str, leader: str = "", num_shards: int = 0) -> None:
        """`leader` is the address that the scheduler has named, empty if none, and `num_shards` the
        number of shards, 0 if it has named none."""
        super().__init__(reason)
        self.leader = leader
        self.num_shards = num_shards


class HandshakeFailedError(NotLeadingError):
    """The scheduler's certificate is not valid, or the gateway's files cannot be used."""


class LeaderStream:
    """A stream to a scheduler that has sent its hello. It has a connection of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        # The one with the hello.
        self.first_frame: scheduler_pb2.ConnectResponse
        self._call: StreamCall | None = None
        self._hello: asyncio.Future[scheduler_pb2.ConnectResponse] = asyncio.Future()
        self._ended: asyncio.Future[CallEnded] = asyncio.Future()
        # Received after the hello and before `run`.
        self._frames = deque[scheduler_pb2.ConnectResponse]()
        self._on_frame: Callable[[scheduler_pb2.ConnectResponse], object] = self._frames.append

    @classmethod
    async def open(
        cls, address: str, hello: scheduler_pb2.GatewayHello, tls: TLS | None, host: str
    ) -> Self:
        """Open a stream and exchange hellos; with TLS the scheduler's certificate has the host.
        NotLeadingError if that fails."""
        stream = cls(address)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                stream._call = await connect(stream._make_call, address, tls, host)
                stream.send(scheduler_pb2.ConnectRequest(hello=hello))
                stream.first_frame = await stream._hello
                if not stream.first_frame.HasField("hello"):
                    raise NotLeadingError("the first frame has no hello")
        except BaseException as error:
            stream.close()
            match error:
                case CallEnded():
                    raise _refusal(error) from error
                case TimeoutError():
                    raise NotLeadingError(f"no hello within {HELLO_TIMEOUT_S} s") from error
                case DecodeError():
                    raise NotLeadingError(f"the first frame: {error}") from error
                case ssl.SSLError() | TLSError():
                    raise HandshakeFailedError(f"UNAVAILABLE: {error}") from error
                case OSError():
                    raise NotLeadingError(f"UNAVAILABLE: {error}") from error
            raise
        return stream

    async def run(self, on_frame: Callable[[scheduler_pb2.ConnectResponse], object]) -> CallEnded:
        """Call `on_frame` with each frame, from the first one on, until the stream ends; return
        its status. What `on_frame` raises ends the stream, and is raised."""
        self._on_frame = on_frame
        self._deliver(self.first_frame)
        while self._frames:
            self._deliver(self._frames.popleft())
        return await self._ended

    def send(self, frame: scheduler_pb2.ConnectRequest) -> None:
        """Send a frame. CallEnded if the stream has ended."""
        assert self._call is not None
        self._call.send(frame.SerializeToString())

    async def wait_sent(self) -> None:
        """Wait until the scheduler and the socket have taken all, or the stream has ended."""
        assert self._call is not None
        await self._call.wait_sent()

    def half_close(self) -> None:
        """Let the scheduler know that no frame follows. It ends the stream then."""
        assert self._call is not None
        self._call.half_close()

    def close(self) -> None:
        """Cancel the stream unless it has ended."""
        self._on_frame = lambda frame: None
        if self._call is not None:
            self._call.cancel()
        self._hello.cancel()
        self._ended.cancel()

    def _make_call(self) -> StreamCall:
        return StreamCall(
            _CONNECT,
            authority(self.address),
            INTERNAL_MESSAGE_BYTES,
            self._receive,
            self._end,
            _KEEP_ALIVE,
        )

    def _receive(self, message: bytes) -> None:
        try:
            frame = scheduler_pb2.ConnectResponse.FromString(message)
        except DecodeError as error:
            self._fail(error)
            return
        if self._hello.done():
            self._deliver(frame)
        else:
            self._hello.set_result(frame)

    def _deliver(self, frame: scheduler_pb2.ConnectResponse) -> None:
        if not self._ended.done():
            try:
                self._on_frame(frame)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the stream, since a frame could not be handled."""
        # The one that is awaited.
        if self._hello.done():
            self._ended.set_exception(error)
        else:
            self._hello.set_exception(error)
        assert self._call is not None
        self._call.cancel()

    def _end(self, ended: CallEnded) -> None:
        if not self._hello.done():
            self._hello.set_exception(ended)
            # Read once, since the attempt may have been given up before.
            self._hello.exception()
        if not self._ended.done():
            self._ended.set_result(ended)


def metadata_of(ended: CallEnded) -> Mapping[str, str]:
    """The metadata in the details of a status; empty without any. STANDBY names the leader and the
    number of shards."""
    try:
        status = status_pb2.Status.FromString(ended.packed_status)
    except DecodeError:
        return {}
    metadata: Mapping[str, str] = RequestError.from_status(status).info.metadata
    return metadata


def _refusal(ended: CallEnded) -> NotLeadingError:
    named = metadata_of(ended)
    num_shards = named.get("num_shards", "")
    leader = named.get("leader", "")
    return NotLeadingError(str(ended), leader, int(num_shards) if num_shards.isdecimal() else 0)

"""A streaming call over HTTP/2 without gRPC, to a server of gRPC."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import uvloop
from certificates import make_certificates
from google.rpc import status_pb2
from grpc import StatusCode
from grpc_servers import server_options
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from quire.service.channels import INTERNAL_MESSAGE_BYTES
from quire.service.errors import RequestError, abort, unavailable
from quire.service.http2 import frames
from quire.service.http2.call import KeepAlive, StreamCall
from quire.service.http2.call_status import CallEnded
from quire.service.http2.connect import authority, connect
from quire.service.http2.frames import Frame, FrameReader, ProtocolError
from quire.service.http2.messages import MessageReader, pack_message
from quire.service.tls import TLS, ServerTLS

# More than all windows at first, and than a frame.
LARGE = 3 * 2**20 + 17
_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handler = Callable[[AsyncIterator[bytes], _Context], AsyncIterator[bytes]]


async def echo(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def refuse(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
    await anext(requests)
    await context.abort(StatusCode.FAILED_PRECONDITION, "epoch 3 is 100 % stale: é")
    yield b""


@asynccontextmanager
async def serving(
    handler: _Handler, listen: str, identity: ServerTLS | None = None
) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    def same(message: bytes) -> bytes:
        return message

    method = grpc.stream_stream_rpc_method_handler(handler, same, same)
    server = grpc.aio.server(options=server_options(INTERNAL_MESSAGE_BYTES))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Service", {"Run": method}),)
    )
    if identity is None:
        port = server.add_insecure_port(listen)
    else:
        port = server.add_secure_port(listen, _credentials(identity))
    await server.start()
    try:
        yield (listen if listen.startswith("unix:") else f"127.0.0.1:{port}"), server
    finally:
        await server.stop(None)


def _credentials(identity: ServerTLS) -> grpc.ServerCredentials:
    assert identity.client_ca is not None
    pair = (identity.key.read_bytes(), identity.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], identity.client_ca.read_bytes(), True)


class Client:
    """A call with what it has received."""

    def __init__(self, address: str, keep_alive: KeepAlive | None = None) -> None:
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.ended: asyncio.Future[CallEnded] = asyncio.Future()
        self.call = StreamCall(
            "/example.Service/Run",
            authority(address),
            INTERNAL_MESSAGE_BYTES,
            self.messages.put_nowait,
            self.ended.set_result,
            keep_alive,
        )

    @classmethod
    async def connected(
        cls, address: str, tls: TLS | None = None, name: str | None = None
    ) -> "Client":
        client = cls(address)
        await connect(lambda: client.call, address, tls, name)
        return client


def test_the_call_of_a_connection_that_is_cancelled_when_it_is_made_ends() -> None:
    """uvloop does not report the end of such a connection."""
    problems: list[object] = []

    async def run() -> CallEnded:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context)
        )
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = Client(address, KeepAlive(0.05, 0.05))
        made = client.call.connection_made

        def cancel_when_made(transport: asyncio.BaseTransport) -> None:
            made(transport)
            opening.cancel()

        client.call.connection_made = cancel_when_made  # type: ignore[method-assign]
        opening = asyncio.ensure_future(connect(lambda: client.call, address, None))
        with pytest.raises(asyncio.CancelledError):
            await opening
        ended = await client.ended
        client.call.cancel()
        server.close()
        return ended

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()).code is StatusCode.UNAVAILABLE
    assert not problems


@pytest.mark.parametrize("size", [0, 1, 2**14, LARGE])
async def test_messages_arrive_in_both_directions(size: int, tmp_path_factory) -> None:
    listen = f"unix:{tmp_path_factory.mktemp('s')}/a.sock"
    async with serving(echo, listen) as (address, _):
        client = await Client.connected(address)
        sent = [bytes([number]) * size for number in range(8)]
        for message in sent:
            client.call.send(message)
        assert [await client.messages.get() for _ in sent] == sent
        client.call.cancel()
        assert (await client.ended).code is StatusCode.CANCELLED


async def test_windows_are_raised_again(monkeypatch) -> None:
    monkeypatch.setattr("quire.service.http2.call._WINDOW_STEP", 1000)
    async with serving(echo, "127.0.0.1:0") as (address, _):
        client = await Client.connected(address)
        for _ in range(3):
            client.call.send(bytes(LARGE))
            assert await client.messages.get() == bytes(LARGE)
        client.call.cancel()


async def test_the_status_of_a_refusal_is_reported() -> None:
    async with serving(refuse, "127.0.0.1:0") as (address, _):
        client = await Client.connected(address)
        client.call.send(b"x")
        ended = await client.ended
        assert ended.code is StatusCode.FAILED_PRECONDITION
        assert ended.details == "epoch 3 is 100 % stale: é"
        with pytest.raises(CallEnded, match="FAILED_PRECONDITION"):
            client.call.send(b"x")


async def test_the_details_of_a_status_are_reported() -> None:
    async def fail(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        await abort(context, unavailable("STANDBY", "no", metadata={"leader": "unix:/é"}))
        yield b""

    async with serving(fail, "127.0.0.1:0") as (address, _):
        ended = await (await Client.connected(address)).ended
    status = status_pb2.Status.FromString(ended.packed_status)
    assert RequestError.from_status(status).info.metadata == {"leader": "unix:/é"}


async def test_a_half_closed_call_ends_with_the_peers_status() -> None:
    async with serving(echo, "127.0.0.1:0") as (address, _):
        client = await Client.connected(address)
        client.call.send(bytes(LARGE))
        # It waits for what is unsent.
        client.call.half_close()
        assert (await client.ended).code is StatusCode.OK
        assert await client.messages.get() == bytes(LARGE)
        client.call.half_close()


async def test_a_sender_can_wait_for_a_slow_peer() -> None:
    is_read, go_on = asyncio.Event(), asyncio.Event()

    async def slow(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        await go_on.wait()
        async for _ in requests:
            is_read.set()
            yield b""

    async with serving(slow, "127.0.0.1:0") as (address, _):
        client = await Client.connected(address)
        await client.call.wait_sent()
        for _ in range(8):
            client.call.send(bytes(LARGE))
        waiting = asyncio.create_task(client.call.wait_sent())
        assert await asyncio.wait({waiting}, timeout=0.1) == (set(), {waiting})
        go_on.set()
        await waiting
        await is_read.wait()
        go_on.clear()
        for _ in range(8):
            client.call.send(bytes(LARGE))
        client.call.cancel()
        await client.call.wait_sent()


async def test_a_silent_peer_ends_the_call() -> None:
    # The kernel accepts the connection.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = Client(address, KeepAlive(0.05, 0.05))
        await connect(lambda: client.call, address, None)
        assert str(await client.ended) == "UNAVAILABLE: the peer was silent for 0.1 s"


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_connection_of_a_silent_peer_ends_although_data_waits(loop_factory) -> None:
    async def run() -> None:
        window = frames.pack_window_update(0, 2**30) + frames.pack_window_update(1, 2**30)

        async def stop_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frames.pack_settings({}) + window)
            writer.transport.pause_reading()
            await is_lost.wait()
            writer.transport.abort()

        is_lost = asyncio.Event()
        async with await asyncio.start_server(stop_reading, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            client = Client(address, KeepAlive(0.05, 0.05))
            lost = client.call.connection_lost

            def connection_lost(error: Exception | None) -> None:
                lost(error)
                is_lost.set()

            client.call.connection_lost = connection_lost  # type: ignore[method-assign]
            await connect(lambda: client.call, address, None)
            client.call.send(bytes(2**25))
            assert (await client.ended).code is StatusCode.UNAVAILABLE
            async with asyncio.timeout(5):
                await is_lost.wait()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


async def test_a_peer_that_responds_to_pings_is_not_silent() -> None:
    writers: list[asyncio.StreamWriter] = []
    num_pings = 0

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_pings
        writers.append(writer)
        await reader.readexactly(len(frames.PREFACE))
        received = FrameReader(2**20)
        while data := await reader.read(2**16):
            for frame in received.feed(data):
                if frame.kind == frames.PING:
                    num_pings += 1
                    writer.write(frames.pack_frame(frames.PING, frames.ACK, 0, frame.payload))

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        # A busy machine may take long to respond.
        client = Client(address, KeepAlive(0.01, 2))
        await connect(lambda: client.call, address, None)
        await until(lambda: num_pings >= 2, "pings")
        assert client.call.ended is None
        client.call.cancel()
        writers[0].close()


async def test_an_unknown_method_is_reported() -> None:
    async with serving(echo, "127.0.0.1:0") as (address, _):
        client = Client(address)
        client.call._path = "/example.Service/Unknown"
        await connect(lambda: client.call, address, None)
        assert (await client.ended).code is StatusCode.UNIMPLEMENTED


async def test_the_end_of_the_server_ends_the_call() -> None:
    async with serving(echo, "127.0.0.1:0") as (address, server):
        client = await Client.connected(address)
        client.call.send(b"x")
        await client.messages.get()
        await server.stop(None)
        assert (await client.ended).code in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)


async def test_a_cancellation_reaches_the_server() -> None:
    cancelled = asyncio.Event()

    async def wait(requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        yield await anext(requests)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(wait, "127.0.0.1:0") as (address, _):
        client = await Client.connected(address)
        client.call.send(b"x")
        await client.messages.get()
        client.call.cancel()
        await cancelled.wait()


async def test_both_sides_prove_their_identity_with_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certificates", "worker", "scheduler")
    ca = made / "ca.pem"
    identity = ServerTLS(made / "worker.pem", made / "worker-key.pem", ca)
    tls = TLS(ca, made / "scheduler.pem", made / "scheduler-key.pem")
    async with serving(echo, "127.0.0.1:0", identity) as (address, _):
        client = await Client.connected(address, tls, "worker")
        client.call.send(b"x")
        assert await client.messages.get() == b"x"
        client.call.cancel()
        with pytest.raises(OSError, match="certificate"):
            await Client.connected(address, tls, "another")


def test_it_runs_on_the_loop_of_the_service() -> None:
    """Transports of uvloop have other types."""

    async def run() -> None:
        async with serving(echo, "127.0.0.1:0") as (address, _):
            client = await Client.connected(address)
            client.call.send(bytes(LARGE))
            assert await client.messages.get() == bytes(LARGE)
            client.call.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Transport(asyncio.WriteTransport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


@pytest.fixture
def scripted() -> tuple[StreamCall, Transport, list[CallEnded]]:
    """A call whose peer is the test."""
    ended: list[CallEnded] = []
    call = StreamCall("/a/b", "host", 100, lambda message: None, ended.append)
    transport = Transport()
    call.connection_made(transport)
    transport.written.clear()
    return call, transport, ended


@pytest.mark.parametrize(
    ("received", "details"),
    [
        (frames.pack_frame(frames.DATA, frames.END_STREAM, 1), "without a status"),
        (frames.pack_frame(frames.DATA, 0, 1, b"\1\0\0\0\1x"), "compressed"),
        (frames.pack_frame(frames.DATA, 0, 1, b"\0\0\0\0\xffx"), "larger than max"),
        (frames.pack_frame(frames.DATA, frames.PADDED, 1, b"\5xx"), "padding"),
        (frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff"), "headers"),
        (frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x8d"), "HTTP status"),
        (frames.pack_frame(frames.HEADERS, 0, 1) + frames.pack_frame(6, 0, 0), "incomplete"),
        (frames.pack_frame(frames.PUSH_PROMISE, 0, 1), "pushes"),
        (frames.pack_frame(frames.SETTINGS, 0, 0, b"x"), "settings"),
        (frames.pack_frame(frames.GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\0"), "being closed"),
        (frames.pack_frame(frames.WINDOW_UPDATE, 0, 1, b"x"), "too short"),
        (frames.pack_reset(1, 7), "reset"),
        (b"\xff\xff\xff\0\0\0\0\0\1", "bytes"),
    ],
)
def test_what_breaks_the_protocol_ends_the_call(scripted, received, details) -> None:
    call, transport, ended = scripted
    call.data_received(received)
    assert details in str(ended[0])
    assert transport.is_closed
    call.connection_lost(None)
    assert len(ended) == 1


def test_pings_and_settings_are_acknowledged(scripted) -> None:
    call, transport, _ = scripted
    call.data_received(
        frames.pack_frame(frames.PING, 0, 0, b"12345678")
        + frames.pack_frame(frames.PING, frames.ACK, 0, b"12345678")
        + frames.pack_settings({frames.MAX_FRAME_SIZE: 20_000})
        + frames.pack_frame(frames.SETTINGS, frames.ACK, 0)
        + frames.pack_frame(200, 0, 0, b"unknown")
    )
    assert bytes(transport.written) == (
        frames.pack_frame(frames.PING, frames.ACK, 0, b"12345678")
        + frames.pack_frame(frames.SETTINGS, frames.ACK, 0)
    )


def test_a_process_that_was_stopped_itself_takes_no_peer_for_silent(scripted) -> None:
    """Its timers may run before it reads."""
    call, transport, ended = scripted
    keep_alive = KeepAlive(1, 1)

    async def run() -> None:
        now = asyncio.get_running_loop().time()
        call._end_if_silent(keep_alive, now - 9, now - 8)
        assert bytes(transport.written) == frames.pack_frame(frames.PING, 0, 0, bytes(8))
        assert not ended
        call._end_if_silent(keep_alive, now - 1, now)
        assert ended[0].code is StatusCode.UNAVAILABLE

    asyncio.run(run())


@pytest.mark.parametrize("packed", [b"x", b"====x", bytes(range(0x80, 0xA0))])
def test_details_that_cannot_be_read_are_left_out(scripted, packed: bytes) -> None:
    call, _, ended = scripted
    fields = [(b"grpc-status", b"14"), (b"grpc-status-details-bin", packed)]
    flags = frames.END_HEADERS | frames.END_STREAM
    call.data_received(frames.pack_frame(frames.HEADERS, flags, 1, Encoder().encode(fields)))
    assert (ended[0].code, ended[0].packed_status) == (StatusCode.UNAVAILABLE, b"")


def test_messages_wait_for_the_windows(scripted) -> None:
    call, transport, _ = scripted
    call.data_received(frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 10}))
    transport.written.clear()
    call.send(b"123456789")
    assert bytes(transport.written) == frames.pack_frame(0, 0, 1, b"\0\0\0\0\x0912345")
    transport.written.clear()
    call.send(b"")
    assert not transport.written
    call.data_received(frames.pack_window_update(0, 100))
    assert not transport.written
    call.data_received(frames.pack_window_update(1, 100))
    assert bytes(transport.written) == frames.pack_frame(0, 0, 1, b"6789\0\0\0\0\0")


_FRAMES = st.lists(
    st.builds(Frame, st.integers(0, 255), st.integers(0, 255), st.integers(0, 9), st.binary()),
    max_size=5,
)


@given(_FRAMES, st.integers(1, 20))
def test_frames_are_read_in_pieces_of_any_size(sent: list[Frame], size: int) -> None:
    packed = b"".join(frames.pack_frame(*frame) for frame in sent)
    reader = FrameReader(1000)
    pieces = [packed[start : start + size] for start in range(0, len(packed), size)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == sent


@given(st.lists(st.binary(), max_size=5), st.integers(1, 20))
def test_messages_are_read_in_pieces_of_any_size(sent: list[bytes], size: int) -> None:
    packed = b"".join(map(pack_message, sent))
    reader = MessageReader(sys.maxsize)
    pieces = [packed[start : start + size] for start in range(0, len(packed), size)]
    assert [message for piece in pieces for message in reader.feed(piece)] == sent


def test_padding_and_priority_are_dropped() -> None:
    flags = frames.PADDED | frames.PRIORITY
    assert Frame(frames.HEADERS, flags, 1, b"\2-----block..").content == b"block"
    with pytest.raises(ProtocolError):
        _ = Frame(frames.HEADERS, flags, 1, b"\2--").content

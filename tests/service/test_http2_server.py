"""Quire's own server of gRPC, to gRPC's clients."""

import asyncio
import contextlib
import random
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import httpx2
import pytest
import uvloop
from certificates import make_certificates
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from hpack import Encoder
from waiting import until

from quire.service.channels import INTERNAL_MESSAGE_BYTES, channel_options
from quire.service.errors import abort, unavailable
from quire.service.health import Health
from quire.service.http2 import frames
from quire.service.http2.headers import status_fields
from quire.service.http2.limits import Limits
from quire.service.http2.messages import pack_message
from quire.service.http2.server import Server
from quire.service.lifecycle import start_server
from quire.service.tls import TLS, ServerCertificates, ServerTLS, open_aio_channel

SERVICE = "example.Service"
# More than all windows at first, and than a frame.
LARGE = 7 * 2**20 + 17
# Windows keep their size, so that slow readers are noticed soon; channels share no connection.
_OPTIONS = [
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_Context = grpc.aio.ServicerContext[bytes, bytes]


class Servicer:
    """Methods of all kinds, with what has happened to their calls."""

    def __init__(self) -> None:
        self.num_read = 0
        self.num_written = 0
        self.cancelled = asyncio.Event()
        self.has_ended = asyncio.Event()

    async def echo(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        async for request in requests:
            self.num_read += 1
            yield request
        self.has_ended.set()

    async def join(self, requests: AsyncIterator[bytes], context: _Context) -> bytes:
        return b"".join([request async for request in requests])

    async def large(self, request: bytes, context: _Context) -> bytes:
        return bytes(LARGE)

    async def repeat(self, request: bytes, context: _Context) -> AsyncIterator[bytes]:
        """The request without end."""
        try:
            while True:
                yield request
                self.num_written += 1
        finally:
            self.cancelled.set()

    async def refuse(self, request: bytes, context: _Context) -> bytes:
        await abort(context, unavailable("STANDBY", "100 %: é", metadata={"leader": "host:1"}))

    async def fail(self, request: bytes, context: _Context) -> bytes:
        raise ValueError(request.decode())

    async def wait(self, request: bytes, context: _Context) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return b""

    def add_to(self, server: grpc.aio.Server) -> None:
        def same(message: bytes) -> bytes:
            return message

        methods: dict[str, Any] = {
            "Echo": grpc.stream_stream_rpc_method_handler(self.echo, same, same),
            "Join": grpc.stream_unary_rpc_method_handler(self.join, same, same),
            "Large": grpc.unary_unary_rpc_method_handler(self.large, same, same),
            "Repeat": grpc.unary_stream_rpc_method_handler(self.repeat, same, same),
            "Refuse": grpc.unary_unary_rpc_method_handler(self.refuse, same, same),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail, same, same),
            "Wait": grpc.unary_unary_rpc_method_handler(self.wait, same, same),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))


class Stack:
    """A server, and a client's channel to it."""

    def __init__(self, address: str, server: Server, servicer: Servicer) -> None:
        self.address = address
        self.server = server
        self.servicer = servicer
        self.channel: grpc.aio.Channel

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    def unary(self, method: str) -> Callable[..., Any]:
        return self.channel.unary_unary(f"/{SERVICE}/{method}")

    def repeat(self, request: bytes, **options: Any) -> Any:
        return self.channel.unary_stream(f"/{SERVICE}/Repeat")(request, **options)

    def echo(self, **options: Any) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/Echo")(**options)


@asynccontextmanager
async def serving(
    listen: str = "127.0.0.1:0",
    identity: ServerTLS | None = None,
    max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
    tls: TLS | None = None,
    host: str | None = None,
    max_connections: int | None = None,
    interceptor: grpc.aio.ServerInterceptor | None = None,
) -> AsyncIterator[Stack]:
    server, servicer = Server(Limits(max_message_bytes), max_connections, interceptor), Servicer()
    servicer.add_to(server)
    certificates = None if identity is None else ServerCertificates(identity, "h2")
    address = await start_server(server, listen, (SERVICE,), Health(()), None, certificates)
    stack = Stack(address, server, servicer)
    try:
        async with open_aio_channel(address, _OPTIONS, tls, host) as stack.channel:
            yield stack
    finally:
        await server.stop(None)


async def _code_of(call: Any) -> StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


@pytest.mark.parametrize("size", [0, 1, 2**14, LARGE])
async def test_messages_arrive_in_both_directions(size: int, sockets: Path) -> None:
    async with serving(f"unix:{sockets}/a.sock") as stack:
        sent = [bytes([number]) * size for number in range(8)]
        call = stack.echo()
        for message in sent:
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is StatusCode.OK


async def test_a_client_that_ends_its_stream_gets_what_is_left() -> None:
    async with serving() as stack:
        join = stack.channel.stream_unary(f"/{SERVICE}/Join")

        async def parts() -> AsyncIterator[bytes]:
            for number in range(100):
                yield bytes([number]) * 10_000

        whole = b"".join([part async for part in parts()])
        assert await join(parts()) == whole
        assert await join(iter([])) == b""


async def test_many_calls_share_a_connection() -> None:
    async with serving() as stack:
        calls = [stack.echo() for _ in range(50)]
        for number, call in enumerate(calls):
            await call.write(bytes([number]) * 100_000)
        for number, call in enumerate(calls):
            assert await call.read() == bytes([number]) * 100_000
            await call.done_writing()
        assert [await call.code() for call in calls] == [StatusCode.OK] * len(calls)


async def test_many_clients_connect_at_once() -> None:
    async with serving() as stack:

        async def call() -> StatusCode:
            async with open_aio_channel(stack.address, _OPTIONS, None) as other:
                echo = other.stream_stream(f"/{SERVICE}/Echo")()
                await echo.write(b"x")
                assert await echo.read() == b"x"
                await echo.done_writing()
                return await echo.code()

        assert set(await asyncio.gather(*(call() for _ in range(100)))) == {StatusCode.OK}


async def test_the_status_has_its_details() -> None:
    async with serving() as stack:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.unary("Refuse")(b"x")
        error = raised.value
        assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, "100 %: é")
        status = rpc_status.from_call(error)
        assert status is not None
        assert b"host:1" in status.details[0].value


async def test_a_handler_that_fails_ends_its_call_alone() -> None:
    async with serving() as stack:
        call = stack.echo()
        with pytest.raises(grpc.aio.AioRpcError, match="ValueError: why") as raised:
            await stack.unary("Fail")(b"why")
        assert raised.value.code() is StatusCode.UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError, match="ValueError: €€€") as raised:
            await stack.unary("Fail")("€".encode() * 20_000)
        assert raised.value.code() is StatusCode.UNKNOWN
        await call.write(b"x")
        assert await call.read() == b"x"


@pytest.mark.parametrize("message", ["€" * 20_000, "a" * 900 + "€" * 2000, "x" * 9000])
def test_a_long_status_message_is_cut_to_what_clients_accept(message: str) -> None:
    sent = dict(status_fields(StatusCode.UNKNOWN, message))["grpc-message"]
    assert 4096 - 9 < len(sent) <= 4096
    assert message.startswith(unquote(sent))


async def test_an_unknown_method_is_refused() -> None:
    async with serving() as stack:
        assert await _code_of(stack.unary("Unknown")(b"")) is StatusCode.UNIMPLEMENTED


async def test_too_much_metadata_of_a_client_has_its_reason() -> None:
    """gRPC's client sends characters as they are, and disregards the server's limit."""
    async with serving() as stack:
        call = stack.unary("Fail")(b"", metadata=(("a", "x" * 100_000),))
        assert await _code_of(call) is StatusCode.RESOURCE_EXHAUSTED


async def test_metadata_of_clients_is_accepted() -> None:
    async with serving() as stack:
        metadata = (("traceparent", "00-1-2-01"), ("a-bin", bytes(range(256))), ("b", "x" * 6000))
        call = stack.echo(metadata=metadata)
        for _ in range(3):
            await call.write(b"x")
            assert await call.read() == b"x"


async def test_a_deadline_ends_the_handler() -> None:
    async with serving() as stack:
        call = stack.unary("Wait")(b"", timeout=0.05)
        assert await _code_of(call) is StatusCode.DEADLINE_EXCEEDED
        await stack.servicer.cancelled.wait()


async def test_a_cancellation_ends_the_handler() -> None:
    async with serving() as stack:
        call = stack.repeat(b"x")
        await call.read()
        call.cancel()
        await stack.servicer.cancelled.wait()


async def test_the_end_of_a_client_ends_the_handler() -> None:
    async with serving() as stack:
        async with open_aio_channel(stack.address, [], None) as other:
            call = other.unary_stream(f"/{SERVICE}/Repeat")(b"x")
            await call.read()
        await stack.servicer.cancelled.wait()


async def test_a_handler_waits_for_a_slow_client() -> None:
    async with serving() as stack:
        call = stack.repeat(bytes(100_000))
        await call.read()
        written = -1
        while stack.servicer.num_written != written:
            written = stack.servicer.num_written
            # Other calls of the connection go on, which takes the time to fill all buffers.
            echo = stack.echo()
            await echo.write(bytes(LARGE))
            assert await echo.read() == bytes(LARGE)
        assert stack.servicer.num_written < 1000
        for _ in range(written + 10):
            await call.read()


async def test_a_client_waits_for_a_slow_handler() -> None:
    async with serving() as stack:
        call = stack.echo()
        sent = 0

        async def send() -> None:
            nonlocal sent
            while sent < 500:
                await call.write(bytes(100_000))
                sent += 1

        # It reads nothing, so that the handler reads nothing more.
        sending = asyncio.create_task(send())
        before = -1
        while sent != before:
            before = sent
            echo = stack.echo()
            await echo.write(bytes(LARGE))
            assert await echo.read() == bytes(LARGE)
        assert sent < 500
        for _ in range(500):
            assert await call.read() == bytes(100_000)
        await sending


async def test_a_message_that_is_too_large_ends_its_call_alone() -> None:
    async with serving(max_message_bytes=1000) as stack:
        call = stack.echo()
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"larger than max \(1001 vs\. 1000\)"
        ) as raised:
            await stack.unary("Fail")(bytes(1001))
        assert raised.value.code() is StatusCode.RESOURCE_EXHAUSTED
        await call.write(bytes(1000))
        assert await call.read() == bytes(1000)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("size", [1000, LARGE])
async def test_compressed_messages_are_read(compression: grpc.Compression, size: int) -> None:
    async with serving() as stack:
        call = stack.echo(compression=compression)
        for message in (b"x" * size, random.Random(0).randbytes(size), b""):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.code() is StatusCode.OK


async def test_a_message_that_is_too_large_when_it_is_decompressed() -> None:
    """A few bytes may become gigabytes."""
    async with serving(max_message_bytes=2**20) as stack:
        call = stack.unary("Fail")(bytes(2**28), compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.aio.AioRpcError, match="more than 1048576 bytes") as raised:
            await call
        assert raised.value.code() is StatusCode.RESOURCE_EXHAUSTED
        await check_echo(stack)


async def check_echo(stack: Stack) -> None:
    call = stack.echo()
    await call.write(b"x")
    assert await call.read() == b"x"
    await call.done_writing()
    assert await call.code() is StatusCode.OK


async def test_a_handler_knows_the_metadata_and_the_deadline() -> None:
    found: list[Any] = []

    async def look(request: bytes, context: Any) -> bytes:
        found.extend((context.invocation_metadata(), context.time_remaining(), context.code()))
        return b""

    method = grpc.unary_unary_rpc_method_handler(look, bytes, bytes)
    handlers = grpc.method_handlers_generic_handler("a.B", {"Look": method})
    sent = (("key", "1"), ("key", "2"), ("raw-bin", b"\0\xff"))
    async with serving() as stack:
        stack.server.add_generic_rpc_handlers((handlers,))
        call = stack.channel.unary_unary("/a.B/Look")
        await call(b"", metadata=sent, timeout=30)
        metadata, remaining_s, code = found
        assert [pair for pair in metadata if pair[0] != "user-agent"] == [*sent]
        assert "grpc-python" in dict(metadata)["user-agent"]
        # gRPC rounds up.
        assert 0 < remaining_s < 31
        assert code is None
        found.clear()
        await call(b"")
        assert found[1] is None


async def test_a_deadline_that_has_passed_on_the_way() -> None:
    """gRPC's clients round up, others do not."""
    async with serving() as stack:
        for timeout in ("0S", "1n", "300u"):
            metadata = (("grpc-timeout", timeout),)
            code = await _code_of(stack.unary("Wait")(b"", metadata=metadata))
            assert code is StatusCode.DEADLINE_EXCEEDED


async def test_a_response_that_cannot_be_packed_leaves_other_calls_alone() -> None:
    async def respond(request: bytes, context: Any) -> str:
        return "no bytes"

    def pack(response: Any) -> bytes:
        raise TypeError("no message")

    method = grpc.unary_unary_rpc_method_handler(respond, bytes, pack)
    async with serving() as stack:
        handlers = grpc.method_handlers_generic_handler("a.B", {"Fail": method})
        stack.server.add_generic_rpc_handlers((handlers,))
        for _ in range(2):
            assert await _code_of(stack.channel.unary_unary("/a.B/Fail")(b"")) is StatusCode.UNKNOWN
            await check_echo(stack)


async def test_an_interceptor_chooses_the_handler() -> None:
    called: list[tuple[str, Any]] = []

    class Interceptor(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            called.append((details.method, dict(details.invocation_metadata).get("key")))
            if details.method.endswith("Echo"):
                return None
            return await continuation(details)

    async with serving(interceptor=Interceptor()) as stack:
        assert await _code_of(stack.unary("Wait")(b"", timeout=0.1, metadata=(("key", "1"),))) is (
            StatusCode.DEADLINE_EXCEEDED
        )
        assert await _code_of(stack.unary("Echo")(b"")) is StatusCode.UNIMPLEMENTED
        assert await _code_of(stack.unary("Unknown")(b"")) is StatusCode.UNIMPLEMENTED
    assert [method.rpartition("/")[2] for method, _ in called] == ["Wait", "Echo", "Unknown"]
    assert called[0][1] == "1"


async def test_the_status_of_an_aborted_call_is_known_to_it() -> None:
    codes: list[StatusCode | None] = []

    async def refuse(request: bytes, context: Any) -> bytes:
        try:
            await context.abort(StatusCode.NOT_FOUND, "no")
        finally:
            codes.append(context.code())

    method = grpc.unary_unary_rpc_method_handler(refuse, bytes, bytes)
    async with serving() as stack:
        handlers = grpc.method_handlers_generic_handler("a.B", {"Refuse": method})
        stack.server.add_generic_rpc_handlers((handlers,))
        code = await _code_of(stack.channel.unary_unary("/a.B/Refuse")(b""))
    assert codes == [code] == [StatusCode.NOT_FOUND]


async def test_calls_in_progress_may_end_after_a_stop() -> None:
    async with serving() as stack:
        call = stack.echo()
        await call.write(b"x")
        await call.read()
        stopping = asyncio.create_task(stack.server.stop(30))
        # The server says that it stops; the client then uses another connection, and finds none.
        await until(
            lambda: stack.channel.get_state() is not grpc.ChannelConnectivity.READY, "the end"
        )
        await call.write(b"y")
        assert await call.read() == b"y"
        await call.done_writing()
        assert await call.code() is StatusCode.OK
        await stopping
        assert await stack.server.wait_for_termination() is False


async def test_calls_are_ended_after_the_grace_period() -> None:
    async with serving() as stack:
        call = stack.unary("Wait")(b"")
        echo = stack.echo()
        await echo.write(b"x")
        await echo.read()
        await stack.server.stop(0.01)
        assert await _code_of(call) is StatusCode.UNAVAILABLE
        assert stack.servicer.cancelled.is_set()
        assert await _code_of(stack.unary("Fail")(b"")) is StatusCode.UNAVAILABLE


_PING = frames.pack_frame(frames.PING, 0, 0, bytes(8))
_PONG = frames.pack_frame(frames.PING, frames.ACK, 0, bytes(8))


async def test_a_client_that_acknowledges_pings_stays_connected(monkeypatch) -> None:
    monkeypatch.setattr("quire.service.http2.server_connection.KEEPALIVE_S", 0.02)
    monkeypatch.setattr("quire.service.http2.server_connection.PING_TIMEOUT_S", 0.5)
    async with serving() as stack:
        reader, writer = await stack.connect()
        writer.write(frames.PREFACE)
        for _ in range(3):
            await reader.readuntil(_PING)
            writer.write(_PONG)
        writer.close()


async def test_a_client_that_is_stopped_is_disconnected(monkeypatch) -> None:
    monkeypatch.setattr("quire.service.http2.server_connection.KEEPALIVE_S", 0.02)
    monkeypatch.setattr("quire.service.http2.server_connection.PING_TIMEOUT_S", 0.02)
    async with serving() as stack:
        reader, writer = await stack.connect()
        writer.write(frames.PREFACE)
        assert (await reader.read()).endswith(_PING)
        writer.close()


async def test_a_client_that_sends_nothing_is_disconnected(monkeypatch) -> None:
    monkeypatch.setattr("quire.service.http2.server_connection.KEEPALIVE_S", 0.02)
    async with serving() as stack:
        reader, writer = await stack.connect()
        assert _PING not in await reader.read()
        writer.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100])
async def test_garbage_closes_its_connection_alone(garbage: bytes) -> None:
    async with serving() as stack:
        call = stack.echo()
        await call.write(b"x")
        await call.read()
        reader, writer = await stack.connect()
        writer.write(garbage)
        # What is on its way when the server closes the connection resets it.
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        await call.write(b"y")
        assert await call.read() == b"y"


async def test_clients_of_http1_get_what_is_served_as_text() -> None:
    """OpenAI's client with the gRPC address, say, and gRPC-Web."""
    async with serving() as stack:
        url = f"http://{stack.address}/v1/completions"
        async with httpx2.AsyncClient() as client:
            for content in (b"{}", b" " * 2**20):
                response = await client.post(url, content=content)
                assert response.status_code == 400
                assert "gRPC over HTTP/2" in response.text


async def test_files_may_be_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    async with serving() as stack:
        call = stack.echo()
        await call.write(b"x")
        assert await call.read() == b"x"


async def test_connections_beyond_the_limit_are_refused(capsys) -> None:
    async with serving(max_connections=3) as stack:
        call = stack.echo()
        await call.write(b"x")
        await call.read()
        others = [await stack.connect() for _ in range(2)]
        for reader, writer in others:
            # What the server sends first.
            writer.write(frames.PREFACE)
            await reader.readexactly(frames.HEADER.size)
        for _ in range(2):
            reader, writer = await stack.connect()
            with contextlib.suppress(ConnectionError):
                assert not await reader.read()
            writer.close()
        assert capsys.readouterr().out.count("connections are refused") == 1
        await call.write(b"y")
        assert await call.read() == b"y"
        for _, writer in others:
            writer.close()
        # There is room again, as soon as the server has noticed it.
        async with asyncio.timeout(10), contextlib.AsyncExitStack() as opened:
            is_served = False
            while not is_served:
                reader, writer = await stack.connect()
                opened.callback(writer.close)
                writer.write(frames.PREFACE)
                with contextlib.suppress(ConnectionError):
                    is_served = bool(await reader.read(1))


async def test_unfinished_handshakes_count_as_connections(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certificates", "gateway")
    identity = ServerTLS(made / "gateway.pem", made / "gateway-key.pem")
    tls = TLS(made / "ca.pem")
    async with serving(identity=identity, tls=tls, host="gateway", max_connections=3) as stack:
        await check_echo(stack)
        silent = [await stack.connect() for _ in range(2)]
        # Accepted in the order in which they have connected.
        reader, writer = await stack.connect()
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        for _, other in (*silent, (reader, writer)):
            other.close()
        # There is room again; a handshake that has failed does not count.
        async with asyncio.timeout(10):
            while await _is_refused(stack, tls):
                pass


async def _is_refused(stack: Stack, tls: TLS) -> bool:
    """Whether a connection is closed before its handshake is over."""
    host, _, port = stack.address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=tls.ssl_context(), server_hostname="gateway"
        )
    except OSError:
        return True
    writer.close()
    return False


class SlowReader:
    """A client of one call, whose windows are large and whose socket is small."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        self._socket.connect((host, int(port)))
        self._socket.setblocking(False)
        fields = [
            *((":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/Large")),
            *((":authority", "host"), ("content-type", "application/grpc")),
        ]
        self.send(
            frames.PREFACE,
            frames.pack_settings({frames.INITIAL_WINDOW_SIZE: 2**30}),
            frames.pack_window_update(0, 2**30),
            frames.pack_frame(frames.HEADERS, frames.END_HEADERS, 1, Encoder().encode(fields)),
            frames.pack_frame(frames.DATA, frames.END_STREAM, 1, pack_message(b"")),
        )

    def send(self, *parts: bytes) -> None:
        self._socket.sendall(b"".join(parts))

    async def read(self) -> int:
        """The number of bytes until the end; -1 if the connection is reset."""
        loop, num_bytes = asyncio.get_running_loop(), 0
        with self._socket:
            try:
                while data := await loop.sock_recv(self._socket, 2**16):
                    num_bytes += len(data)
            except ConnectionError:
                return -1
        return num_bytes


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_reads_slowly_receives_everything(loop_factory: Any) -> None:
    """It is not taken for one that reads nothing, and receives the rest when the server stops."""

    async def run() -> None:
        async with serving() as stack:
            client = SlowReader(stack.address)
            # The server responds to it while most of the message waits.
            for _ in range(3):
                await asyncio.sleep(0.05)
                client.send(frames.pack_frame(frames.PING, 0, 0, bytes(8)))
            stopping = asyncio.create_task(stack.server.stop(None))
            await asyncio.sleep(0.05)
            # A server that was closed would reset the connection.
            client.send(frames.pack_window_update(0, 1))
            assert await client.read() > LARGE
            await stopping

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


async def test_health_and_reflection_are_served() -> None:
    async with serving() as stack:
        health = health_pb2_grpc.HealthStub(stack.channel)
        response = await health.Check(health_pb2.HealthCheckRequest(service="ready"))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service="none"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown = health.Check(health_pb2.HealthCheckRequest(service="none"))
        assert await _code_of(unknown) is StatusCode.NOT_FOUND
        reflection = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo(iter([request]))
        names = [one.name async for found in call for one in found.list_services_response.service]
        assert SERVICE in names


@pytest.mark.slow
async def test_both_sides_prove_their_identity_with_tls(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certificates", "scheduler", "gateway")
    ca = made / "ca.pem"
    identity = ServerTLS(made / "scheduler.pem", made / "scheduler-key.pem", ca)
    tls = TLS(ca, made / "gateway.pem", made / "gateway-key.pem")
    async with serving(identity=identity, tls=tls, host="scheduler") as stack:
        for size in (1, LARGE):
            call = stack.echo()
            await call.write(bytes(size))
            assert await call.read() == bytes(size)
        for other_tls, host in ((TLS(ca), "scheduler"), (tls, "another"), (None, None)):
            async with open_aio_channel(stack.address, _OPTIONS, other_tls, host) as other:
                call = other.unary_unary(f"/{SERVICE}/Fail")(b"")
                assert await _code_of(call) is StatusCode.UNAVAILABLE
        # Connections are made with the files as they are now; open ones go on.
        identity.cert.write_bytes((made / "worker.pem").read_bytes())
        identity.key.write_bytes((made / "worker-key.pem").read_bytes())
        async with open_aio_channel(stack.address, _OPTIONS, tls, "worker") as other:
            assert await _code_of(other.unary_unary(f"/{SERVICE}/Fail")(b"")) is StatusCode.UNKNOWN
        assert await _code_of(stack.unary("Fail")(b"")) is StatusCode.UNKNOWN


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "localhost:0"])
async def test_all_addresses_of_a_name_are_served(listen: str) -> None:
    async with serving(listen) as stack:
        port = stack.address.rpartition(":")[2]
        for target in (f"127.0.0.1:{port}", f"localhost:{port}"):
            async with open_aio_channel(target, _OPTIONS, None) as other:
                assert await _code_of(other.unary_unary(f"/{SERVICE}/Fail")(b"")) is (
                    StatusCode.UNKNOWN
                )


async def test_an_address_in_use_is_reported(sockets: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: "):
            Server(Limits(1)).bind(f"127.0.0.1:{port}", None)
    (sockets / "file").touch()
    with pytest.raises(OSError, match=r"cannot listen on unix:.*file"):
        Server(Limits(1)).bind(f"unix:{sockets}/file", None)


async def test_an_address_that_is_bound_twice_is_reported() -> None:
    first, second = Server(Limits(1)), Server(Limits(1))
    port = first.bind("127.0.0.1:0", None)
    second.bind(f"127.0.0.1:{port}", None)
    await first.start()
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        await second.start()
    await first.stop(None)


async def test_the_socket_of_a_server_that_was_killed_is_replaced(sockets: Path) -> None:
    path = sockets / "a.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    async with serving(f"unix:{path}") as stack:
        assert await _code_of(stack.unary("Fail")(b"")) is StatusCode.UNKNOWN
    assert not path.exists()


@pytest.mark.slow
def test_it_runs_on_the_loop_of_the_service(tmp_path: Path) -> None:
    """Transports of uvloop have other types."""
    made = make_certificates(tmp_path / "certificates", "scheduler")
    identity = ServerTLS(made / "scheduler.pem", made / "scheduler-key.pem")
    tls = TLS(made / "ca.pem")

    async def run() -> None:
        for options in ({}, {"identity": identity, "tls": tls, "host": "scheduler"}):
            async with serving(**options) as stack:
                call = stack.echo()
                await call.write(bytes(LARGE))
                assert await call.read() == bytes(LARGE)
                slow = stack.repeat(bytes(100_000))
                await slow.read()
                slow.cancel()
                await stack.servicer.cancelled.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def test_a_connection_may_take_as_long_as_to_a_distant_client() -> None:
    async with (
        serving() as stack,
        delayed(stack.address, 0.15) as address,
        open_aio_channel(address, channel_options(), None) as other,
    ):
        assert await _code_of(other.unary_unary(f"/{SERVICE}/Fail")(b"")) is StatusCode.UNKNOWN


@asynccontextmanager
async def delayed(address: str, delay_s: float) -> AsyncIterator[str]:
    """A proxy for the address that passes everything on late, in both directions."""
    host, _, port = address.rpartition(":")
    writers = list[asyncio.StreamWriter]()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            asyncio.get_running_loop().call_later(delay_s, writer.write, data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection(host, int(port))
        writers.extend((writer, to_server[1]))
        await asyncio.gather(pass_on(reader, to_server[1]), pass_on(to_server[0], writer))

    # From Python 3.12 on, a server that ends waits for its connections, and a client may keep one.
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.close()

"""A gateway's stream to a scheduler, over real connections."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import make_certificates
from grpc import StatusCode

from gateway_svc.scheduler import leader_stream
from gateway_svc.scheduler.leader_stream import (
    HandshakeFailedError,
    LeaderStream,
    NotLeadingError,
    metadata_of,
)
from quire.internal.v1 import scheduler_pb2
from quire.service.errors import abort, unavailable
from quire.service.http2.call import KeepAlive
from quire.service.http2.frames import DATA, END_HEADERS, HEADERS, SETTINGS, pack_frame
from quire.service.http2.messages import pack_message
from quire.service.tls import TLS

HELLO = scheduler_pb2.ConnectResponse(epoch=7, hello=scheduler_pb2.SchedulerHello(ready=True))
FRAME = scheduler_pb2.ConnectResponse(epoch=8)
_Requests = AsyncIterator[scheduler_pb2.ConnectRequest]
_Handler = Callable[[_Requests, grpc.aio.ServicerContext[Any, Any]], AsyncIterator[bytes]]


@asynccontextmanager
async def scheduler(handler: _Handler, path: Path) -> AsyncIterator[str]:
    """The address of a scheduler whose `Connect` is the handler."""
    method = grpc.stream_stream_rpc_method_handler(
        handler, scheduler_pb2.ConnectRequest.FromString, lambda message: message
    )
    server = grpc.aio.server()
    service = "quire.internal.v1.SchedulerService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Connect": method}),)
    )
    server.add_insecure_port(f"unix:{path}/s.sock")
    await server.start()
    yield f"unix:{path}/s.sock"
    await server.stop(None)


async def opened(address: str) -> LeaderStream:
    hello = scheduler_pb2.GatewayHello(protocol_version=3, shard=2)
    return await LeaderStream.open(address, hello, None, "")


async def test_a_certificate_for_another_name_is_the_reason(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "scheduler.pem", folder / "scheduler-key.pem")
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", ssl=context) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        hello = scheduler_pb2.GatewayHello()
        with pytest.raises(HandshakeFailedError, match="not valid for 'elsewhere'"):
            await LeaderStream.open(address, hello, TLS(folder / "ca.pem"), "elsewhere")


async def test_frames_are_delivered_in_order_from_the_first_one(sockets: Path) -> None:
    received: list[scheduler_pb2.ConnectRequest] = []

    async def serve(requests: _Requests, context: object) -> AsyncIterator[bytes]:
        received.append(await anext(requests))
        for frame in (HELLO, FRAME):
            yield frame.SerializeToString()
        async for request in requests:
            received.append(request)
            yield FRAME.SerializeToString()

    async with scheduler(serve, sockets) as address:
        stream = await opened(address)
        # The second frame arrives before `run`.
        await asyncio.sleep(0.05)
        frames: list[scheduler_pb2.ConnectResponse] = []
        running = asyncio.create_task(stream.run(frames.append))
        stream.send(scheduler_pb2.ConnectRequest(cancellations=[{}]))
        await stream.wait_sent()
        stream.half_close()
        assert (await running).code is StatusCode.OK
        assert frames == [HELLO, FRAME, FRAME]
        assert received[0].hello.shard == 2
        assert len(received[1].cancellations) == 1


async def test_a_refusal_names_the_leader(sockets: Path) -> None:
    async def refuse(
        requests: _Requests, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        metadata = {"leader": "unix:/l", "num_shards": "4"}
        await abort(context, unavailable("STANDBY", "it does not lead", metadata=metadata))
        yield b""

    async with scheduler(refuse, sockets) as address:
        with pytest.raises(NotLeadingError, match="UNAVAILABLE: it does not lead") as caught:
            await opened(address)
        assert (caught.value.leader, caught.value.num_shards) == ("unix:/l", 4)


@pytest.mark.parametrize("address", ["unix:/no/such", "127.0.0.1:1"])
async def test_no_scheduler_at_the_address(address: str) -> None:
    with pytest.raises(NotLeadingError, match="UNAVAILABLE"):
        await opened(address)


async def test_no_hello(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_stream, "HELLO_TIMEOUT_S", 0.1)
    ended = asyncio.Event()

    async def hang(requests: _Requests, context: object) -> AsyncIterator[bytes]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        yield b""

    async with scheduler(hang, sockets) as address:
        with pytest.raises(NotLeadingError, match=r"no hello within 0\.1 s"):
            await opened(address)
        await ended.wait()


@pytest.mark.parametrize(
    ("first", "reason"), [(FRAME.SerializeToString(), "no hello"), (b"\xff", "parsing")]
)
async def test_a_first_frame_that_is_no_hello(sockets: Path, first: bytes, reason: str) -> None:
    async def serve(requests: _Requests, context: object) -> AsyncIterator[bytes]:
        yield first
        await asyncio.Event().wait()

    async with scheduler(serve, sockets) as address:
        with pytest.raises(NotLeadingError, match=reason):
            await opened(address)


@pytest.mark.parametrize("frame", [FRAME.SerializeToString(), b"\xff"])
async def test_a_frame_that_cannot_be_handled_ends_the_stream(sockets: Path, frame: bytes) -> None:
    ended = asyncio.Event()

    async def serve(requests: _Requests, context: object) -> AsyncIterator[bytes]:
        yield HELLO.SerializeToString()
        try:
            yield frame
            await asyncio.Event().wait()
        finally:
            ended.set()

    def handle(frame: scheduler_pb2.ConnectResponse) -> None:
        if not frame.HasField("hello"):
            raise KeyError("unknown")

    async with scheduler(serve, sockets) as address:
        stream = await opened(address)
        with pytest.raises(Exception, match=r"unknown|parsing"):
            await stream.run(handle)
        await ended.wait()


async def test_a_scheduler_that_is_cut_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_stream, "_KEEP_ALIVE", KeepAlive(0.05, 0.05))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Only what a scheduler sends first."""
        headers = b"\x88\x5f\x10application/grpc"  # The status 200, and the content type.
        writer.write(
            pack_frame(SETTINGS, 0, 0)
            + pack_frame(HEADERS, END_HEADERS, 1, headers)
            + pack_frame(DATA, 0, 1, pack_message(HELLO.SerializeToString()))
        )
        await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        stream = await opened(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ended = await stream.run(lambda frame: None)
        assert ended.code is StatusCode.UNAVAILABLE
        assert "was silent" in ended.details
        assert metadata_of(ended) == {}

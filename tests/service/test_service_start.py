import asyncio
import contextlib
import resource
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from quire.service.channels import PUBLIC_MESSAGE_BYTES
from quire.service.health import Health
from quire.service.http2 import frames
from quire.service.http2.limits import Limits
from quire.service.http2.server import Server
from quire.service.lifecycle import raise_file_limit, start_server

SERVICE = "example.v1.ExampleService"


@pytest.fixture
async def health() -> Health:
    return Health(("redis", "worker"), (SERVICE,))


@pytest.fixture
async def address(health: Health) -> AsyncIterator[str]:
    server = Server(Limits(PUBLIC_MESSAGE_BYTES))
    yield await start_server(server, "127.0.0.1:0", (SERVICE,), health)
    await server.stop(None)


async def test_health_is_listed(address: str, health: Health) -> None:
    serving, not_serving, unknown = (
        health_pb2.HealthCheckResponse.ServingStatus.Value(name)
        for name in ("SERVING", "NOT_SERVING", "UNKNOWN")
    )
    async with grpc.aio.insecure_channel(address) as channel:

        async def listed() -> dict[str, int]:
            listing = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
            return {name: response.status for name, response in listing.statuses.items()}

        expected = {"": serving, "redis": unknown, "worker": unknown}
        assert await listed() == {**expected, "ready": not_serving, SERVICE: not_serving}
        await health.passed("redis")
        await health.passed("worker")
        names = ("", "redis", "worker", "ready", SERVICE)
        assert await listed() == dict.fromkeys(names, serving)
        await health.stopping()
        assert await listed() == dict.fromkeys(names, not_serving)


async def test_a_watcher_that_does_not_read_keeps_nothing_from_changing(
    address: str, health: Health
) -> None:
    class Unread:
        def peer(self) -> str:
            return "other"

        async def write(self, response: object) -> None:
            await asyncio.Event().wait()

    request = health_pb2.HealthCheckRequest(service="ready")
    unread: Any = Unread()
    blocked = asyncio.create_task(health.servicer.Watch(request, unread))
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(5):
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        statuses = [(await watch.read()).status]
        await health.passed("redis")
        await health.passed("worker")
        statuses.append((await watch.read()).status)
        await health.stopping()
        statuses.append((await watch.read()).status)
        watch.cancel()
    serving, not_serving = (
        health_pb2.HealthCheckResponse.ServingStatus.Value(name)
        for name in ("SERVING", "NOT_SERVING")
    )
    assert statuses == [not_serving, serving, not_serving]
    blocked.cancel()


async def test_the_watches_of_a_connection_are_limited(address: str) -> None:
    request = health_pb2.HealthCheckRequest(service="ready")
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(address, own) as channel,
        grpc.aio.insecure_channel(address, own) as other,
    ):
        watches = [health_pb2_grpc.HealthStub(channel).Watch(request) for _ in range(100)]
        for watch in watches:
            assert (await watch.read()).status
        with pytest.raises(grpc.aio.AioRpcError, match="100 watches") as refused:
            await health_pb2_grpc.HealthStub(channel).Watch(request).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health_pb2_grpc.HealthStub(other).Watch(request).read()).status
        watches[0].cancel()
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await health_pb2_grpc.HealthStub(channel).Watch(request).read()
                    break


async def test_an_address_for_health_alone_permits_little(
    health: Health, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for no certificate and no key."""
    monkeypatch.setattr("quire.service.health._MAX_OWN_CONNECTIONS", 2)
    path = sockets / "health.sock"
    await health.start()
    await health.listen(f"unix:{path}")
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 2**14))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frames.PREFACE)
        size = int.from_bytes(await reader.readexactly(3), "big")
        _, settings = await reader.readexactly(6), await reader.readexactly(size)
        limit = struct.pack(">HI", frames.MAX_CONCURRENT_STREAMS, 100)
        assert limit in settings
        other_reader, other_writer = await asyncio.open_unix_connection(path)
        assert await other_reader.read() == b""
    for one in (writer, other_writer):
        one.close()
    await health.close()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_responds_under_both_names(address: str, version: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        reflect = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            *(
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
                for symbol in ("grpc.health.v1.Health", "grpc.health.v1.Health.Watch")
            ),
        ]
        listed, *described = [response async for response in reflect(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    files = [one.file_descriptor_response.file_descriptor_proto for one in described]
    assert files[0]
    assert files[0] == files[1]
    assert described[1].original_request == requests[2]


async def test_an_address_in_use_has_a_clear_message(address: str) -> None:
    with pytest.raises(OSError, match=address) as caught:
        await start_server(Server(Limits(PUBLIC_MESSAGE_BYTES)), address, (), Health(()))
    assert "GRPC_VERBOSITY" not in str(caught.value)


def test_services_open_as_many_files_as_they_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

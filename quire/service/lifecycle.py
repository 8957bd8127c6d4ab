"""Starts a service's server, and drains and stops it on signals."""

import asyncio
import contextlib
import resource
import signal
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from quire.service.errors import abort, failed
from quire.service.files import replace_contents
from quire.service.health import Health
from quire.service.http2.server import Server
from quire.service.tls import ServerCertificates

log = structlog.get_logger()

# Equal to v1alpha on the wire. Some clients request only this name.
_STABLE_REFLECTION = "grpc.reflection.v1.ServerReflection"


class Signals:
    """Events that SIGTERM and SIGINT set: the first signal `drain`, the second `stop`."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.stop if self.drain.is_set() else self.drain).set()

    async def drain_within(self, drain: Callable[[], Awaitable[None]], grace_s: float) -> None:
        """Run `drain` until it ends, the grace period is over, or a second signal arrives."""
        work = asyncio.ensure_future(drain())
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({work, stop}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)


def end_at_interrupts() -> None:
    """Let SIGINT end the process as SIGTERM does, without a traceback, until `Signals` are
    installed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_file_limit() -> None:
    """Let this process open as many files as it may. The usual limit of 1,024 exists for programs
    that call select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems have no limit, and refuse to set that.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def start_server(
    server: Server,
    listen: str,
    services: Sequence[str],
    health: Health,
    address_file: Path | None = None,
    certificates: ServerCertificates | None = None,
    health_listen: str | None = None,
) -> str:
    """Add health and reflection, bind and start; return the bound address.

    `listen` is `host:port` or `unix:/path`; port 0 picks a free one. With certificates it has TLS.
    `health_listen` serves health alone. OSError if an address cannot be bound.
    """
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    _add_reflection((*services, "grpc.health.v1.Health"), server)
    port = server.bind(listen, certificates)
    await health.start()
    if health_listen is not None:
        await health.listen(health_listen)
    await server.start()
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    if address_file is not None:
        replace_contents(address_file, address)
    log.info("listening", address=address, tls=certificates is not None)
    return address


class _Reflection(reflection.aio.ReflectionServicer):
    """Parses requests itself: gRPC's own parsing ends a malformed one with UNKNOWN. It also finds
    methods, which gRPC's own servicer does not."""

    async def respond(
        self, requests: AsyncIterable[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        async for data in requests:
            try:
                request = reflection_pb2.ServerReflectionRequest.FromString(data)
            except DecodeError:
                message = "the request cannot be parsed as ServerReflectionRequest"
                error = failed(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", message)
                await abort(context, error)
            # Its type stub declares a coroutine.
            responses: Any = self.ServerReflectionInfo(_only(_findable(request)), context)
            async for response in responses:
                response.original_request.CopyFrom(request)
                yield response


def _findable(
    request: reflection_pb2.ServerReflectionRequest,
) -> reflection_pb2.ServerReflectionRequest:
    """Ask for a method's service, which is in the same file; other requests are returned."""
    try:
        method = descriptor_pool.Default().FindMethodByName(request.file_containing_symbol)
    except KeyError:
        return request
    service = method.containing_service.full_name
    return reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)


async def _only(
    request: reflection_pb2.ServerReflectionRequest,
) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    yield request


def _add_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """List and serve reflection as v1 and v1alpha."""
    _describe_stable_reflection()
    servicer = _Reflection((*services, reflection.SERVICE_NAME, _STABLE_REFLECTION))
    # Without a deserializer gRPC passes the bytes to the method.
    method: Any = grpc.stream_stream_rpc_method_handler(
        servicer.respond,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (reflection.SERVICE_NAME, _STABLE_REFLECTION):
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def _describe_stable_reflection() -> None:
    """Add the descriptor of v1, which grpcio-reflection does not have: clients that ask for every
    service that is listed would fail. It differs from that of v1alpha in names alone."""
    pool = descriptor_pool.Default()
    with contextlib.suppress(KeyError):
        pool.FindServiceByName(_STABLE_REFLECTION)
        return
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = text_format.MessageToString(file).replace("v1alpha", "v1")
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))

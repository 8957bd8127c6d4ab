"""A service's life in four visible steps: start up, serve, drain, stop."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc

from quire.service.health import Health
from quire.service.reflection import add_reflection

log = structlog.get_logger()


class Signals:
    """The first signal (SIGTERM, SIGINT) asks to drain, the second to stop."""

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
        """Runs `drain` until it ends, the grace is over, or a second signal comes."""
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


async def start_server(
    server: grpc.aio.Server,
    listen: str,
    services: Sequence[str],
    health: Health,
    address_file: Path | None = None,
) -> str:
    """Adds health and reflection, binds, starts; returns the bound address.

    `listen` is `host:port`, where port 0 picks a free one, or `unix:/path`. OSError if it cannot
    be bound.
    """
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    add_reflection((*services, "grpc.health.v1.Health"), server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        # gRPC does not say which of these it is.
        why = "in use, not an address of this machine, or not permitted"
        raise OSError(f"cannot listen on {listen}: {why}") from error
    await health.start()
    await server.start()
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    if address_file is not None:
        # Renamed into place, so that a reader never sees half an address.
        partial = address_file.with_suffix(".partial")
        partial.write_text(address)
        partial.rename(address_file)
    log.info("listening", address=address)
    return address

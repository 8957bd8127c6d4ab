"""Serves metrics over HTTP in Prometheus' text format."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Annotated
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server
from pydantic import AfterValidator

from quire.service.addresses import check_address
from quire.service.http2.listening import WILDCARDS
from quire.service.tls import ServerCertificates

log = structlog.get_logger()


def check_metrics_address(value: str) -> str:
    """Return the address. ValueError unless it is a TCP port: Prometheus scrapes nothing else."""
    if value.startswith("unix:"):
        raise ValueError("must be host:port or [IPv6 address]:port")
    return check_address(value)


MetricsAddress = Annotated[str, AfterValidator(check_metrics_address)]


@dataclass(frozen=True)
class MetricsServer:
    """An HTTP server that collects a registry at each scrape, in its own threads."""

    # host:port.
    address: str
    _server: WSGIServer
    _thread: Thread

    async def stop(self) -> None:
        """Return when the port is free. Does not wait for a scrape in progress."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def export_process(registry: CollectorRegistry) -> None:
    """Export the processor time, memory and files of this process, under Prometheus' usual names;
    nothing on systems without /proc."""
    ProcessCollector(registry=registry)


def export_expiry(registry: CollectorRegistry, certificates: ServerCertificates | None) -> None:
    """Export when the certificate of a service expires, if it has one."""
    if certificates is not None:
        gauge = Gauge(
            "quire:tls_certificate_expiry_timestamp_seconds",
            "When the certificate that the service presents expires, in seconds since the epoch.",
            registry=registry,
        )
        gauge.set_function(certificates.expires_at)


async def start_metrics(listen: str, registry: CollectorRegistry) -> MetricsServer:
    """Serve a registry at `host:port`; port 0 picks a free one. OSError if it cannot be bound."""
    host, _, port = listen.rpartition(":")
    try:
        # In a thread: binding resolves the host name.
        server, thread = await asyncio.to_thread(_start, host.strip("[]"), int(port), registry)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {listen}: {error.strerror}") from error
    address = f"{host}:{server.server_port}"
    log.info("serving metrics", address=address)
    return MetricsServer(address, server, thread)


def _start(host: str, port: int, registry: CollectorRegistry) -> tuple[WSGIServer, Thread]:
    if host in WILDCARDS and socket.has_dualstack_ipv6():
        # Otherwise there is no IPv6, or the port is in use, which the other attempt reports.
        with contextlib.suppress(OSError):
            return start_http_server(port, "::", registry)
        host = "0.0.0.0"
    return start_http_server(port, host, registry)


@asynccontextmanager
async def serving_metrics(
    listen: str | None, registry: CollectorRegistry
) -> AsyncIterator[MetricsServer | None]:
    """Serve metrics within the context, if there is an address. OSError as
    `start_metrics`."""
    if listen is None:
        yield None
        return
    server = await start_metrics(listen, registry)
    try:
        yield server
    finally:
        await server.stop()

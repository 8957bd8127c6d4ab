import asyncio
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter
from pydantic import TypeAdapter, ValidationError

from quire.service.metrics.server import MetricsAddress, start_metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


async def scraped(address: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            return response.read().decode()

    return await asyncio.to_thread(get)


async def test_every_scrape_has_the_current_values(registry: CollectorRegistry) -> None:
    pages = Counter("quire:pages", "Pages that were printed.", registry=registry)
    server = await start_metrics("127.0.0.1:0", registry)
    assert "quire:pages_total 0.0\n" in await scraped(server.address)
    pages.inc(3)
    assert "quire:pages_total 3.0\n" in await scraped(server.address)
    await server.stop()
    with pytest.raises(urllib.error.URLError):
        await scraped(server.address)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_all_addresses_are_those_of_both_families(registry: CollectorRegistry) -> None:
    for host in ("0.0.0.0", "[::]"):
        server = await start_metrics(f"{host}:0", registry)
        port = server.address.rpartition(":")[2]
        for peer in ("127.0.0.1", "[::1]"):
            await scraped(f"{peer}:{port}")
        with pytest.raises(OSError, match=r"cannot serve metrics on .*in use"):
            await start_metrics(server.address, registry)
        await server.stop()


async def test_a_port_is_free_after_the_stop(registry: CollectorRegistry) -> None:
    first = await start_metrics("127.0.0.1:0", registry)
    await first.stop()
    second = await start_metrics(first.address, registry)
    assert second.address == first.address
    await second.stop()


async def test_a_port_in_use_is_reported(registry: CollectorRegistry) -> None:
    server = await start_metrics("127.0.0.1:0", registry)
    with pytest.raises(OSError, match=rf"cannot serve metrics on {server.address}: .*in use"):
        await start_metrics(server.address, registry)
    await server.stop()


@pytest.mark.parametrize("address", ["unix:/run/metrics.sock", "9100", "127.0.0.1:99999"])
def test_an_address_that_cannot_be_scraped_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="must "):
        TypeAdapter(MetricsAddress).validate_python(address)

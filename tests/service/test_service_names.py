"""Names resolved concurrently, and their changes reported."""

import asyncio
import socket

from waiting import until

from quire.service.addresses import NameResolver


async def test_names_that_fail_to_resolve_do_not_delay_the_others():
    resolver = NameResolver(("localhost:50053", "unix:/run/worker.sock", "no-such-host.invalid:1"))
    resolving = asyncio.create_task(resolver.run())
    await until(lambda: len(resolver.addresses) >= 2, "the names that resolve")
    assert "unix:/run/worker.sock" in resolver.addresses
    assert all(address.endswith((":50053", ".sock")) for address in resolver.addresses)
    resolving.cancel()
    await asyncio.gather(resolving, return_exceptions=True)


async def test_a_link_local_address_keeps_its_interface():
    resolver = NameResolver(("[fe80::1%lo]:5", "[::1]:6", "127.0.0.1:7"))
    resolving = asyncio.create_task(resolver.run())
    await until(lambda: len(resolver.addresses) == 3, "all addresses")
    index = socket.if_nametoindex("lo")
    assert resolver.addresses == {f"[fe80::1%{index}]:5", "[::1]:6", "127.0.0.1:7"}
    resolving.cancel()
    await asyncio.gather(resolving, return_exceptions=True)


async def test_a_change_of_a_names_addresses_is_reported(monkeypatch):
    resolved = [frozenset({"10.0.0.1:1"})] * 5 + [frozenset({"10.0.0.2:1"})] * 5
    left, changes = iter(resolved), []

    async def resolve(name: str) -> frozenset[str]:
        return next(left, resolved[-1])

    monkeypatch.setattr("quire.service.addresses._resolve", resolve)
    monkeypatch.setattr("quire.service.addresses.LOOKUP_INTERVAL_S", 0)
    resolver = NameResolver(("worker:1",), lambda: changes.append(resolver.addresses))
    resolving = asyncio.create_task(resolver.run())
    await until(lambda: left.__length_hint__() == 0, "all lookups")
    assert changes == [resolved[0], resolved[-1]]
    resolving.cancel()
    await asyncio.gather(resolving, return_exceptions=True)

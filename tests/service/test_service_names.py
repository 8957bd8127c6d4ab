"""Names resolved concurrently, and their changes reported."""

import asyncio
import socket
import threading
from collections import Counter

import uvloop
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


def test_names_whose_server_hangs_delay_no_other_nor_the_end(monkeypatch):
    """They are more than the threads of any loop, and each has one lookup at a time."""
    released, num_lookups = threading.Event(), Counter[str]()
    getaddrinfo = socket.getaddrinfo

    def look_up(name: str, port: int, **options: int) -> list[object]:
        if not options.get("flags") and name.endswith(".hangs"):
            num_lookups[name] += 1
            released.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no response")
        return getaddrinfo(name, port, **options)

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    hanging = [f"{i}.hangs" for i in range(40)]

    async def resolve() -> None:
        resolver = NameResolver([*(f"{name}:1" for name in hanging), "localhost:2"])
        for _ in range(3):
            resolving = asyncio.create_task(resolver.run())
            await until(lambda: len(num_lookups) == len(hanging), "all lookups")
            await until(lambda: resolver.addresses, "the name that resolves")
            resolving.cancel()
            await asyncio.gather(resolving, return_exceptions=True)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(resolve())
        # The loop has ended before any of them.
        assert not released.is_set()
        assert num_lookups == Counter(hanging)
    finally:
        released.set()

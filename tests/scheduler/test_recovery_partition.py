"""A leader that loses its connection to Redis, which others still have."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from checking_worker import CheckingWorker
from scheduler_stack import info_of, prompt, running_stack
from waiting import until


class Relay:
    """Forwards connections from one Unix socket to another until it is cut."""

    def __init__(self, path: Path, server: str) -> None:
        self._path, self._server_path = path, server.removeprefix("unix://")
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        try:
            yield
        finally:
            self.cut()

    def cut(self) -> None:
        """Break all connections, and accept no more."""
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._server_path)
        both = {writer, back}
        self._open |= both
        await asyncio.gather(_forward(reader, back), _forward(there, writer))
        self._open -= both


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


async def test_a_leader_without_redis_gives_way_to_one_that_has_taken_its_workers(
    redis_url, sockets
):
    """Otherwise its gateways would wait at it for as long as it is cut off."""
    relay = Relay(sockets / "relay.sock", redis_url)
    async with (
        relay.listening(),
        running_stack(relay.url, sockets, {"a": CheckingWorker(1)}, lease_s=1) as stack,
    ):
        gateway = await stack.gateway()
        leader, standby = stack.member, stack.start_scheduler(redis_url=redis_url)
        await until(lambda: standby.is_standby, "a standby")
        received = gateway.received[await gateway.submit(prompt(9), max_tokens=50)]
        await until(lambda: len(received.token_ids) >= 3, "some tokens")
        relay.cut()
        await until(lambda: gateway.lost is not None, "the end of the gateway's stream", 10)
        assert info_of(gateway.lost).reason == "LEAD_ENDS"
        assert not leader.is_leading
        again = await stack.gateway()
        [ended] = await again.wait_ended(await again.submit_again(received))
        assert ended.is_whole


async def test_a_leader_without_redis_keeps_its_gateways_while_no_other_leads(redis_url, sockets):
    relay = Relay(sockets / "relay.sock", redis_url)
    async with (
        relay.listening(),
        running_stack(relay.url, sockets, {"a": CheckingWorker(1)}, lease_s=0.2) as stack,
    ):
        gateway = await stack.gateway()
        lease = stack.member.term.lease
        relay.cut()
        await until(lambda: not lease.is_held, "the end of the lease")
        await until(lambda: lease.error is not None, "a renewal that fails")
        assert gateway.lost is None

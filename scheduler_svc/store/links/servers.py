"""Several servers of one URL, of which one takes writes."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection, SSLConnection

from quire.service.addresses import Lookups
from scheduler_svc.store.links.link import ServerLink

# Of the time to connect: for a name, and for each node of a cluster that is asked for the keys.
_SHARE_OF_NODE: Final = 1 / 4
# For other servers to respond, once one response is enough.
_FOR_OTHERS_S: Final = 0.1

_Response = TypeVar("_Response")


@dataclass(frozen=True)
class Servers:
    addresses: Sequence[tuple[str, int]]
    uses_tls: bool
    # The monitored service of Sentinels.
    service: str
    # The key whose node is wanted, of a cluster.
    key: str
    # For connections to Redis itself, and to Sentinels.
    options: Mapping[str, Any]
    sentinel_options: Mapping[str, Any]
    lookups: Lookups = field(default_factory=Lookups)

    def server(self, host: str, port: int) -> ServerLink:
        """A link to one of them, or to a server that they name."""
        kind = SSLConnection if self.uses_tls else Connection
        return ServerLink(lambda: kind(host=host, port=port, **self.options), self.lookups)

    def sentinel(self, host: str, port: int) -> Redis:
        """A client of one of them, a Sentinel."""
        return Redis(host=host, port=port, ssl=self.uses_tls, **self.sentinel_options)

    def cluster(self, addresses: Iterable[tuple[str, int]]) -> RedisCluster:
        """A client of the cluster that nodes at these addresses belong to."""
        options = {name: value for name, value in self.options.items() if name != "db"}
        # A node that hangs leaves time to ask others.
        for name in ("socket_timeout", "socket_connect_timeout"):
            options[name] *= _SHARE_OF_NODE
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in addresses],
            ssl=self.uses_tls,
            # Other slots are not of interest.
            require_full_coverage=False,
            **options,
        )

    async def look_up(self, host: str, port: int) -> bool:
        """Whether the name server has responded in time, be it with an error."""
        try:
            async with asyncio.timeout(self.options["socket_connect_timeout"] * _SHARE_OF_NODE):
                await self.lookups.wait_for(f"{host}:{port}")
        except TimeoutError:
            return False
        return True


class GroupLink:
    """The server that takes writes, of several."""

    def __init__(
        self, servers: Servers, find: Callable[[Servers], Awaitable[tuple[str, int]]]
    ) -> None:
        """`find` asks them for its address."""
        self._servers = servers
        self._find = find
        self._link: ServerLink | None = None

    async def connect(self) -> asyncio.WriteTransport:
        self._link = self._servers.server(*await self._find(self._servers))
        return await self._link.connect()

    async def disconnect(self) -> None:
        if self._link is not None:
            await self._link.disconnect()


async def ask_all(
    questions: Iterable[Coroutine[Any, Any, _Response]], is_enough: Callable[[_Response], bool]
) -> list[_Response]:
    """The responses to all questions, in their order; once one is enough, without those that come
    more than a tenth of a second later."""
    asked = [asyncio.create_task(question) for question in questions]
    pending = set(asked)
    has_enough = False
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending,
                timeout=_FOR_OTHERS_S if has_enough else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                break
            has_enough |= any(is_enough(task.result()) for task in done)
        return [task.result() for task in asked if task not in pending]
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

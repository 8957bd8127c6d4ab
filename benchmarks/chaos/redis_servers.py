"""The Redis of a run: a server, or a cluster whose replicas stand in for killed primaries."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import redis

from benchmarks.redis_cluster import RedisCluster, RedisNode
from quire.launcher.child import ChildProcess
from quire.launcher.directory import PrivateDirectory
from quire.launcher.errors import LaunchError
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.spawner import Spawner
from quire.launcher.supervisor import Supervisor

_TAKEOVER_S = 20.0
_POLL_S = 0.05
_NO_TTL = -1


class RedisServers(Protocol):
    """What faults and checks need of either."""

    @property
    def processes(self) -> Sequence[ChildProcess]: ...

    def client(self) -> Any:
        """A client of all servers, as a context."""

    def find_problem(self) -> str | None:
        """Return what has not recovered yet."""


class SingleRedis:
    """The stack's own server."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server

    @property
    def processes(self) -> Sequence[ChildProcess]:
        return [self._server]

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self._server.url)

    def find_problem(self) -> str | None:
        return None if self._server.is_alive else "redis is down"


class ClusterServers:
    """A cluster whose nodes are restarted when they end."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        private = PrivateDirectory.make()
        self._undo.callback(private.remove)
        spawner = Spawner()
        self._undo.callback(spawner.close)
        self._cluster = RedisCluster(private.path, spawner.call)
        self._undo.callback(self._cluster.close)

    def start(self, on_end: Any) -> None:
        """`on_end` is called with how a node ended, before it is restarted."""
        try:
            self._cluster.start()
        except BaseException:
            self.close()
            raise
        self._undo.callback(Supervisor(self._cluster.nodes, on_end).close)

    @property
    def url(self) -> str:
        return self._cluster.url

    @property
    def logs(self) -> list[Path]:
        return [node.log_file for node in self._cluster.nodes]

    @property
    def processes(self) -> Sequence[ChildProcess]:
        return self._cluster.nodes

    def client(self) -> redis.RedisCluster:
        return self._cluster.client()

    def find_problem(self) -> str | None:
        return self._cluster.find_problem()

    def shards_of(self, node: RedisNode, num_shards: int) -> frozenset[int]:
        """The shards whose keys a primary has."""
        owners = [self._cluster.primary_of(hash_tag(shard)) for shard in range(num_shards)]
        return frozenset(shard for shard, owner in enumerate(owners) if owner is node)

    def primary_of(self, shard: int) -> RedisNode:
        """LaunchError if no node knows it."""
        node = self._cluster.primary_of(hash_tag(shard))
        if node is None:
            raise LaunchError(f"no primary has shard {shard}'s keys")
        return node

    async def replace(self, shard: int) -> str:
        """Kill the primary with a shard's keys. It is started again once its replica has taken
        over: if it was back earlier, it would remain the primary. TimeoutError if none does."""
        node = self.primary_of(shard)
        killed = f"{node.name} (pid {node.pid})"
        node.autorestart = False
        node.kill()
        try:
            successor = await self._successor(node, shard)
        finally:
            node.launch()
            node.autorestart = True
        return f"{killed}, replaced by {successor.name}"

    def close(self) -> None:
        self._undo.close()

    async def _successor(self, killed: RedisNode, shard: int) -> RedisNode:
        async with asyncio.timeout(_TAKEOVER_S):
            while True:
                node = await asyncio.to_thread(self._cluster.primary_of, hash_tag(shard))
                if node is not None and node is not killed:
                    return node
                await asyncio.sleep(_POLL_S)


def hash_tag(shard: int) -> str:
    """A key in the slot of a shard's keys."""
    return f"quire:{{shard:{shard}}}"


def record_key(shard: int, request_id: str) -> str:
    """The key of a request's record, without authentication."""
    return f"{hash_tag(shard)}:request:/{quote(request_id, safe='')}:record"


def live_records(servers: RedisServers) -> list[str]:
    """Request records without a TTL: only live requests have none."""
    with servers.client() as client:
        keys = list(client.scan_iter("quire:{shard:*}:request:*", count=1000))
        return [key.decode() for key in keys if client.ttl(key) == _NO_TTL]


def shards_of_requests(
    servers: RedisServers, request_ids: Collection[str], num_shards: int
) -> Mapping[str, frozenset[int]]:
    """The shards that have a record of each request; several if it has moved, none if it is not
    recorded. redis.RedisError while servers are down."""
    sought = [(request_id, shard) for request_id in request_ids for shard in range(num_shards)]
    with servers.client() as client, client.pipeline(**_without_transaction(client)) as pipeline:
        for request_id, shard in sought:
            pipeline.exists(record_key(shard, request_id))
        exists = pipeline.execute()
    found: dict[str, set[int]] = {request_id: set() for request_id in request_ids}
    for (request_id, shard), is_there in zip(sought, exists, strict=True):
        if is_there:
            found[request_id].add(shard)
    return {request_id: frozenset(shards) for request_id, shards in found.items()}


def _without_transaction(client: Any) -> dict[str, bool]:
    return {} if isinstance(client, redis.RedisCluster) else {"transaction": False}

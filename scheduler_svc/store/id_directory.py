"""Which shard has a request whose id a client chose. The keys do not depend on the number of
shards."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Self

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.keys import id_key, ids_prefix
from scheduler_svc.store.requests import RequestKey

_TIMEOUT_S = 2.0
# Hash tags over which the ids are spread, so that the nodes of a Redis Cluster share them.
_NUM_PARTS = 16


class Claim(StrEnum):
    """Which ids a call changes; see claim_ids.lua."""

    NEW = "new"
    KNOWN = "known"
    ALL = "all"


class IdDirectory:
    """Notes and reads the shards of ids. Every method raises StoreUnavailable."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        """One connection, or one for each part."""
        self._connections = connections

    @classmethod
    def at(cls, url: str, password: str | None = None) -> Self:
        """As `Store.at`. Only a cluster needs several connections."""
        num_connections = _NUM_PARTS if "+cluster://" in url else 1
        return cls(
            [
                Connection.to(url, _TIMEOUT_S, password, ids_prefix(part))
                for part in range(num_connections)
            ]
        )

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()

    async def claim(
        self, ids: Sequence[RequestKey], shard: int, ttl_s: int, which: Claim
    ) -> list[int | None]:
        """Note for `ttl_s` seconds that a shard has these ids; return the shard that has each one
        now, None for an id that is not noted."""
        parts: dict[int, list[int]] = defaultdict(list)
        for index, key in enumerate(ids):
            parts[_part_of(key)].append(index)
        found: list[int | None] = [None] * len(ids)

        async def claim_part(part: int, indices: list[int]) -> None:
            keys = [id_key(part, ids[i].principal, ids[i].request_id) for i in indices]
            connection = self._connections[part % len(self._connections)]
            shards = await connection.run(scripts.CLAIM_IDS, keys, (shard, ttl_s, which.value))
            for index, stored in zip(indices, shards, strict=True):
                found[index] = int(stored) if stored else None

        await asyncio.gather(*(claim_part(*part) for part in parts.items()))
        return found


def _part_of(key: RequestKey) -> int:
    digest = blake2b(f"{key.principal}\n{key.request_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _NUM_PARTS

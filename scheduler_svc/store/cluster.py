"""What schedulers know of one another, in Redis: heartbeats, loads, and the map of the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.keys import ClusterKeys
from scheduler_svc.store.packing import mapping

_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Timed:
    """What was written, and when, in milliseconds by Redis' clock."""

    written_ms: int
    value: bytes

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read what heartbeat.lua has written; anything else counts as written long ago."""
        written_ms, _, value = packed.partition(b" ")
        return cls(int(written_ms) if written_ms.isdigit() else 0, value)


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """All that was read by one heartbeat."""

    now_ms: int
    # Addresses, by scheduler id; an empty one of a scheduler that drains.
    schedulers: Mapping[str, Timed]
    # By shard, as its last leader has written it.
    loads: Mapping[int, Timed]
    # None if there is none yet.
    packed_map: bytes | None


class ClusterStore:
    """One scheduler's heartbeats. Needs no leadership. Every method raises StoreUnavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keys = ClusterKeys()

    @classmethod
    def at(cls, url: str, password: str | None = None) -> Self:
        """As `Store.at`."""
        return cls(Connection.to(url, _TIMEOUT_S, password, ClusterKeys().map))

    async def close(self) -> None:
        await self._connection.close()

    async def beat(
        self, scheduler_id: str, address: str, expiry_ms: int, loads: Mapping[int, bytes]
    ) -> ClusterReading:
        """Note that a scheduler runs, with the loads of the shards that it leads; an empty address
        notes that it drains. Schedulers without a heartbeat for `expiry_ms` are forgotten."""
        keys = self._keys
        packed = [part for shard, load in loads.items() for part in (shard, load)]
        now_ms, schedulers, stored, packed_map = await self._connection.run(
            scripts.HEARTBEAT,
            (keys.schedulers, keys.loads, keys.map),
            (scheduler_id, address, expiry_ms, *packed),
        )
        return ClusterReading(
            now_ms=int(now_ms),
            schedulers={name.decode(): Timed.parse(x) for name, x in _pairs(schedulers)},
            loads={int(n): Timed.parse(load) for n, load in _pairs(stored) if n.isdigit()},
            packed_map=packed_map,
        )

    async def exchange(self, shard: int, report: bytes) -> dict[int, bytes]:
        """Write what tenants use in a shard; return the last reports of all shards."""
        key = self._keys.tenants
        _, stored = await self._connection.snapshot(("HSET", key, shard, report), ("HGETALL", key))
        return _by_shard(stored)

    async def read_reports(self) -> dict[int, bytes]:
        """Return the last reports of all shards on what tenants use."""
        [stored] = await self._connection.snapshot(("HGETALL", self._keys.tenants))
        return _by_shard(stored)


def _by_shard(flat: Any) -> dict[int, bytes]:
    return {int(shard): packed for shard, packed in _pairs(flat) if shard.isdigit()}


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    return list(mapping(flat).items())

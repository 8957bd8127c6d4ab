"""How much work a shard has, as its leader writes it for the others."""

import json
from dataclasses import astuple, dataclass, fields
from typing import Self

import structlog

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """The load of one shard."""

    # Where its leader is; empty if unknown.
    leader: str = ""
    # Workers that take requests, and the rows that they have left.
    num_workers: int = 0
    num_free_rows: int = 0
    # Sequences of live requests, and those of them that wait for a worker.
    num_live: int = 0
    num_waiting: int = 0
    # Times that it has asked for shares of tenants' limits that other shards may not need any more.
    num_asks: int = 0
    # Gateways that are connected to its leader.
    num_gateways: int = 0
    # That of the leader's term: a higher one than that of another shard has begun later.
    epoch: int = 0
    # The longest sequence for which one of its workers has blocks now, in tokens.
    num_free_tokens: int = 0

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed load. Numbers that a later version appends are ignored. ValueError for
        anything else."""
        try:
            leader, *numbers = json.loads(packed)
            found = cls(leader, *numbers[: len(fields(cls)) - 1])
        except (TypeError, RecursionError) as error:
            raise ValueError(repr(error)) from error
        if not isinstance(leader, str) or not all(type(x) is int and x >= 0 for x in numbers):
            raise ValueError("not an address and numbers")
        return found

    def pack(self) -> bytes:
        """For Redis."""
        return json.dumps(astuple(self)).encode()


class LoadCodec:
    """Converts the loads of all shards, each when it has changed: most are the same in the next
    heartbeat."""

    def __init__(self) -> None:
        # By shard, what was converted last.
        self._parsed: dict[int, tuple[bytes, ShardLoad]] = {}
        self._packed: dict[int, tuple[ShardLoad, bytes]] = {}

    def parse(self, shard: int, packed: bytes) -> ShardLoad:
        """A shard's load; an empty one if it cannot be read, which is logged once."""
        known = self._parsed.get(shard)
        if known is not None and known[0] == packed:
            return known[1]
        try:
            load = ShardLoad.parse(packed)
        except ValueError as error:
            log.error("the load of a shard is not readable", shard=shard, reason=str(error))
            load = ShardLoad()
        self._parsed[shard] = packed, load
        return load

    def pack(self, shard: int, load: ShardLoad) -> bytes:
        """A shard's load, for Redis."""
        known = self._packed.get(shard)
        if known is not None and known[0] == load:
            return known[1]
        packed = load.pack()
        self._packed[shard] = load, packed
        return packed

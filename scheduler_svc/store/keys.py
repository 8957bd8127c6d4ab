"""All Redis keys. They share a hash tag, so that a Redis Cluster keeps them in one slot: scripts of
pools and requests also take the leadership's key."""

from typing import Final
from urllib.parse import quote

_SHARD: Final = "quire:{shard:0}"
LEADERSHIP: Final = f"{_SHARD}:leadership"
ENDED: Final = f"{_SHARD}:ended"
TENANTS: Final = f"{_SHARD}:tenants"
POOLS: Final = f"{_SHARD}:pools"
# The SCAN pattern of all request records.
REQUEST_PATTERN: Final = f"{_SHARD}:request:*:record"


class PoolKeys:
    """The keys of one pool."""

    def __init__(self, incarnation: int) -> None:
        prefix = f"{_SHARD}:pool:{incarnation:016x}"
        self.state = f"{prefix}:state"
        self.free = f"{prefix}:free"
        self.references = f"{prefix}:references"
        self.hashes = f"{prefix}:hashes"
        self.index = f"{prefix}:index"
        self.published = f"{prefix}:published"
        self.journal = f"{prefix}:journal"
        # The KEYS of blocks.lua, in its order.
        self.blocks = (self.state, self.free, self.references, self.hashes, self.index)
        self.all = (*self.blocks, self.published, self.journal)


def request_keys(principal: str, request_id: str) -> tuple[str, str]:
    """The record and the output of a request. Quoting keeps ("a/b", "c") from ("a", "b/c"), and
    braces out of the hash tag."""
    prefix = f"{_SHARD}:request:{quote(principal, safe='')}/{quote(request_id, safe='')}"
    return f"{prefix}:record", f"{prefix}:output"


def output_key(record_key: str) -> str:
    """The output that belongs to a record."""
    return f"{record_key.removesuffix(':record')}:output"

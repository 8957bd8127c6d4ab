"""All Redis keys. Those of a shard share a hash tag, so that a Redis Cluster keeps them in one
slot: scripts of pools and requests also take the leadership's key."""

from urllib.parse import quote


class PoolKeys:
    """The keys of one pool."""

    def __init__(self, shard_prefix: str, incarnation: int) -> None:
        prefix = f"{shard_prefix}:pool:{incarnation:016x}"
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


class ShardKeys:
    """The keys of one shard."""

    def __init__(self, shard: int) -> None:
        self._prefix = f"quire:{{shard:{shard}}}"
        self.leadership = f"{self._prefix}:leadership"
        self.ended = f"{self._prefix}:ended"
        self.tenants = f"{self._prefix}:tenants"
        self.pools = f"{self._prefix}:pools"
        # The SCAN pattern of all request records.
        self.request_pattern = f"{self._prefix}:request:*:record"

    def pool(self, incarnation: int) -> PoolKeys:
        """The keys of the pool of a worker's incarnation."""
        return PoolKeys(self._prefix, incarnation)

    def request(self, principal: str, request_id: str) -> tuple[str, str]:
        """The record and the output of a request. Quoting keeps ("a/b", "c") from ("a", "b/c"), and
        braces out of the hash tag."""
        prefix = f"{self._prefix}:request:{quote(principal, safe='')}/{quote(request_id, safe='')}"
        return f"{prefix}:record", f"{prefix}:output"


def output_key(record_key: str) -> str:
    """The output that belongs to a record."""
    return f"{record_key.removesuffix(':record')}:output"

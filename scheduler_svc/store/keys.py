"""All Redis keys. Those of a shard share a hash tag, so that a Redis Cluster keeps them in one
slot: scripts of pools and requests also take the leadership's key."""

from urllib.parse import quote, unquote


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
        self.inbox = f"{self._prefix}:inbox"
        # Never written. A node that gives the slot away redirects calls with it, as with every key
        # that it has given away.
        self.absent = f"{self._prefix}:absent"
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

    def request_of(self, record_key: str) -> tuple[str, str]:
        """The principal and the request id of a record's key."""
        quoted = record_key.removeprefix(f"{self._prefix}:request:").removesuffix(":record")
        principal, _, request_id = quoted.partition("/")
        return unquote(principal), unquote(request_id)


class ClusterKeys:
    """The keys of all schedulers together. They are in the slot of shard 0, whose leader is fenced
    when it writes the map."""

    def __init__(self) -> None:
        prefix = "quire:{shard:0}:cluster"
        self.schedulers = f"{prefix}:schedulers"
        self.loads = f"{prefix}:loads"
        self.map = f"{prefix}:map"
        self.tenants = f"{prefix}:tenants"


def ids_prefix(part: int) -> str:
    """What the keys of one part of the directory of ids begin with."""
    return f"quire:{{ids:{part}}}"


def id_key(part: int, principal: str, request_id: str) -> str:
    """The key that names the shard of a request whose id a client chose."""
    return f"{ids_prefix(part)}:{quote(principal, safe='')}/{quote(request_id, safe='')}"


def output_key(record_key: str) -> str:
    """The output that belongs to a record."""
    return f"{record_key.removesuffix(':record')}:output"

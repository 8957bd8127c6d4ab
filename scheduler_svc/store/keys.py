"""All Redis keys. A pool's keys share a hash tag, and a request's. Scripts of requests also take
the leadership's key, so their keys are not in one slot of a Redis Cluster."""

from typing import Final
from urllib.parse import quote

LEADERSHIP: Final = "quire:{leadership}:epoch"
ENDED: Final = "quire:{requests}:ended"
TENANTS: Final = "quire:{tenants}:state"
POOLS: Final = "quire:{pools}:incarnations"
# The SCAN pattern of all request records.
REQUEST_PATTERN: Final = "quire:{request:*}:record"


class PoolKeys:
    """The keys of one pool."""

    def __init__(self, incarnation: int) -> None:
        prefix = f"quire:{{pool:{incarnation:016x}}}"
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
    """The record and the output of a request. Quoting keeps ("a/b", "c") from ("a", "b/c")."""
    tag = f"quire:{{request:{quote(principal, safe='')}/{quote(request_id, safe='')}}}"
    return f"{tag}:record", f"{tag}:output"


def output_key(record_key: str) -> str:
    """The output that belongs to a record."""
    return f"{record_key.removesuffix(':record')}:output"

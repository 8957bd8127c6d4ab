"""Every key in Redis, with the tag that keeps what one script touches together."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

LEADERSHIP: Final = "quire:{leadership}:epoch"
ENDED: Final = "quire:{requests}:ended"
POOLS: Final = "quire:{pools}:incarnations"


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The keys of one pool."""

    incarnation: int

    @property
    def state(self) -> str:
        return self._named("state")

    @property
    def free(self) -> str:
        return self._named("free")

    @property
    def references(self) -> str:
        return self._named("references")

    @property
    def hashes(self) -> str:
        return self._named("hashes")

    @property
    def index(self) -> str:
        return self._named("index")

    @property
    def published(self) -> str:
        return self._named("published")

    @property
    def journal(self) -> str:
        return self._named("journal")

    @property
    def blocks(self) -> tuple[str, ...]:
        """What blocks.lua works on, in its order."""
        return (self.state, self.free, self.references, self.hashes, self.index)

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.blocks, self.published, self.journal)

    def _named(self, name: str) -> str:
        return f"quire:{{pool:{self.incarnation:016x}}}:{name}"


def request_pattern() -> str:
    """What SCAN finds all records by."""
    return "quire:{request:*}:record"


def request_keys(principal: str, request_id: str) -> tuple[str, str]:
    """The record and the output of a request. Quoting keeps ("a/b", "c") from ("a", "b/c")."""
    tag = f"quire:{{request:{quote(principal, safe='')}/{quote(request_id, safe='')}}}"
    return f"{tag}:record", f"{tag}:output"


def output_key(record_key: str) -> str:
    """The output that belongs to a record."""
    return f"{record_key.removesuffix(':record')}:output"

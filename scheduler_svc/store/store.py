"""The scheduler's door to Redis."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from scheduler_svc.store.pool import Pool
from scheduler_svc.store.requests import (
    Ending,
    OutputRun,
    RequestKey,
    RequestRecord,
    StoredRequest,
)


@dataclass(frozen=True, slots=True)
class Leadership:
    """The right to write: a fencing number and its holder's random id."""

    epoch: int
    holder: bytes  # 16 bytes


class Store:
    """Everything the scheduler keeps in Redis. Every method raises StoreUnavailable."""

    leadership: Leadership

    @classmethod
    async def connect(cls, url: str) -> Self:
        """`unix:///path`, `redis://` or `rediss://`. Raises the epoch: older leaders are fenced."""
        raise NotImplementedError

    async def close(self) -> None: ...

    async def ping(self) -> None: ...

    async def raise_epoch(self) -> Leadership:
        """Takes the leadership anew. Pools are to be opened again."""
        raise NotImplementedError

    def pool(self, incarnation: int, num_blocks: int, enable_prefix_caching: bool = True) -> Pool:
        """The pool of a worker's life, under the present leadership; open it before use."""
        raise NotImplementedError

    async def pools(self) -> frozenset[int]:
        """Incarnations of all pools that were opened and not dropped."""
        raise NotImplementedError

    async def sweep(self, keep: Collection[int]) -> frozenset[int]:
        """Drops all pools but those to keep; returns the dropped ones."""
        raise NotImplementedError

    async def record(self, records: Sequence[RequestRecord]) -> list[bool]:
        """Writes live records; False, and no effect, where the id is live already."""
        raise NotImplementedError

    async def fold(self, runs: Sequence[OutputRun]) -> None:
        """Adds output tokens to live records. A repeated run has no effect; PoolFault for a gap,
        for tokens that contradict the stored ones and for an unknown request; nothing changes."""
        raise NotImplementedError

    async def finish(self, endings: Sequence[Ending], ttl_s: int = 600) -> None:
        """Ends live records, which then live on for `ttl_s`. The first ending stands."""
        raise NotImplementedError

    async def discard(self, keys: Sequence[RequestKey]) -> None:
        """Deletes records of requests that were never accepted."""
        raise NotImplementedError

    async def load(self, key: RequestKey) -> StoredRequest | None:
        """The record of a request, live or finished; None if there is none."""
        raise NotImplementedError

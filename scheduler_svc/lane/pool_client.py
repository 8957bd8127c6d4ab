"""A lane's calls to its pool in Redis, and the pool's state after the last commit."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from scheduler_svc.core.stats import LaneStats
from scheduler_svc.lane.sequence_table import Rows
from scheduler_svc.store.decode_commits import DecodeCommits
from scheduler_svc.store.errors import PoolFault
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import Commit, CommitReply, PrefixMatch

_Reply = TypeVar("_Reply")


class PoolClient:
    """Runs one call at a time, retries it while Redis is unavailable, and counts those of steps."""

    def __init__(self, pool: Pool, first_step: int, rows: Rows, stats: LaneStats) -> None:
        self.pool = pool
        self.stats = stats
        # The last step committed, and the last one whose references were checked.
        self.last_step = self.checked_step = first_step
        self.num_free_blocks = pool.num_blocks - 1
        self._rows = rows
        self._lock = asyncio.Lock()
        # A commit that was begun and has no reply; set when it has one.
        self._begun: asyncio.Event | None = None

    async def commit(self, commit: Commit) -> CommitReply:
        # A repeated commit gets the stored reply, so retrying is safe.
        reply = await self._timed(lambda: self.pool.commit(commit))
        self.last_step = commit.step
        self.num_free_blocks = reply.num_free_blocks
        return reply

    def decode_commits(
        self,
        sequence_ids: list[int],
        first_indices: list[int],
        on_end: Callable[[CommitReply | None], None],
    ) -> DecodeCommits:
        return self.pool.decode_commits(sequence_ids, first_indices, on_end)

    @property
    def is_idle(self) -> bool:
        """Whether no call is in progress."""
        return self._begun is None and not self._lock.locked()

    def begun(self) -> None:
        """A commit was begun, outside of this client; other calls wait until it has ended."""
        self._begun = asyncio.Event()

    async def wait_begun(self) -> None:
        """Wait until the commit that was begun, if any, has ended."""
        if self._begun is not None:
            await self._begun.wait()

    def ended(self, step: int, reply: CommitReply | None, redis_s: float) -> None:
        """The commit that was begun has ended, with a reply or without."""
        if self._begun is not None:
            self._begun.set()
            self._begun = None
        self.stats.num_redis_calls += 1
        self.stats.redis_s += redis_s
        if reply is not None:
            self.last_step = step
            self.num_free_blocks = reply.num_free_blocks

    async def match(self, queries: list[list[bytes]]) -> list[PrefixMatch]:
        return await self._timed(lambda: self.pool.match(queries))

    async def _timed(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        started = time.perf_counter()
        reply = await self._execute(call)
        self.stats.num_redis_calls += 1
        self.stats.redis_s += time.perf_counter() - started
        return reply

    async def _execute(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        async with self._lock:
            await self.wait_begun()
            return await self.pool.retry(call)

    async def trim_journal(self, through_step: int) -> None:
        await self._execute(lambda: self.pool.trim_journal(through_step))

    async def reset_prefix_cache(self) -> int:
        return await self._execute(self.pool.reset_prefix_cache)

    async def check(self) -> None:
        """PoolFault unless the pool's references equal the lane's."""
        audit = await self._execute(self.pool.audit)
        tables = +self._rows.references
        if audit.references != tables or audit.num_free != self.num_free_blocks:
            raise PoolFault(
                f"after step {self.last_step} the pool holds {audit.num_held} blocks and has "
                f"{audit.num_free} free; the lane's tables hold {len(tables)}, "
                f"the lane counts {self.num_free_blocks} free"
            )
        self.checked_step = self.last_step

"""Compacts a pool's journal into the request records, concurrently with the steps."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.pool_client import PoolClient

COMPACT_EVERY_STEPS = 64


class JournalCompaction:
    """Runs at most one compaction at a time. `compact` writes journaled tokens to the records."""

    def __init__(
        self, pool: PoolClient, compact: Callable[[list[Sequence]], Awaitable[None]]
    ) -> None:
        self._pool = pool
        self._compact = compact
        # The first one comes early, by a number of steps that depends on the worker: lanes whose
        # workers run in step would all compact at once, and delay all streams.
        self._last_step = pool.last_step - pool.pool.incarnation % COMPACT_EVERY_STEPS
        # Sequences that left the lane since the last compaction, with tokens in the journal.
        self.uncompacted: list[Sequence] = []
        self._task: asyncio.Task[None] | None = None

    def is_due(self, step: int) -> bool:
        """Whether `start_if_due` would do anything."""
        is_over = self._task is not None and self._task.done()
        return is_over or (self._task is None and step >= self._last_step + COMPACT_EVERY_STEPS)

    def start_if_due(self, step: int, sequences: Iterable[Sequence]) -> None:
        """Start a compaction every 64 steps. Raises the error of the previous one, if any."""
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        if self._task is None and step >= self._last_step + COMPACT_EVERY_STEPS:
            self._last_step = step
            self._task = asyncio.create_task(self._run(list(sequences), step))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, sequences: list[Sequence], step: int) -> None:
        num_uncompacted = len(self.uncompacted)
        sequences += self.uncompacted
        # Not through the pool client, whose calls run one at a time.
        await self._pool.pool.retry(lambda: self._compact(sequences))
        del self.uncompacted[:num_uncompacted]
        await self._pool.trim_journal(step)

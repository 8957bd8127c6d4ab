"""Folds a pool's journal into the request records, beside the steps."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.patience import Patience
from scheduler_svc.store.pool import Pool

FOLD_EVERY_STEPS = 64


class Folding:
    """Once in so many steps, one at a time. `fold` brings records up to what is journaled."""

    def __init__(
        self,
        pool: Pool,
        patience: Patience,
        fold: Callable[[list[Sequence]], Awaitable[None]],
        first_step: int,
    ) -> None:
        self._pool = pool
        self._patience = patience
        self._fold = fold
        self._folded_step = first_step
        # Sequences that went back to the queue since the journal was folded.
        self.recalled: list[Sequence] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, recalled: list[Sequence]) -> None:
        """These have tokens in the journal, and leave the lane."""
        self.recalled += recalled

    def look(self, step: int, everybody: Iterable[Sequence]) -> None:
        """Starts to fold if it is time. Raises what a former folding has raised."""
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = None
        if self._task is None and step >= self._folded_step + FOLD_EVERY_STEPS:
            self._folded_step = step
            self._task = asyncio.create_task(self._run(list(everybody), step))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, sequences: list[Sequence], step: int) -> None:
        num_recalled = len(self.recalled)
        sequences += self.recalled
        # Folding and committing do not touch the same keys.
        await Patience().ask(lambda: self._fold(sequences))
        del self.recalled[:num_recalled]
        await self._patience.ask(lambda: self._pool.trim_journal(step))

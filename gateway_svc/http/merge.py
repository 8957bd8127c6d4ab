"""Merges asynchronous generators."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class Merge(Generic[T]):
    """Items of several sources, as they come; each source runs in a task of its own.

    Each source has at most one item in the queue, so that a slow reader holds the sources back and
    none is starved by the others.
    """

    def __init__(self) -> None:
        # Items, and what to set when one has been read.
        self._queue = asyncio.Queue[tuple[T | BaseException | None, asyncio.Event]]()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, source: AsyncGenerator[T, None]) -> None:
        self._tasks.append(asyncio.create_task(self._forward(source)))

    async def items(self) -> AsyncGenerator[T, None]:
        """Yield items until all sources have ended. The first error of one ends them all."""
        num_ended = 0
        try:
            while num_ended < len(self._tasks):
                item, was_read = await self._queue.get()
                was_read.set()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_ended += 1
                else:
                    yield item
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, source: AsyncGenerator[T, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await self._put(item).wait()
        except Exception as error:
            end = error
        # Not waited for: a source whose reader has ended, and whose task is cancelled, may raise
        # another error than the cancellation.
        self._put(end)

    def _put(self, item: T | BaseException | None) -> asyncio.Event:
        """Queue an item; return what is set when it is read."""
        was_read = asyncio.Event()
        self._queue.put_nowait((item, was_read))
        return was_read

"""Merges asynchronous generators."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class Merge(Generic[T]):
    """Items of several sources, as they come; each source runs in a task of its own.

    The queue holds one item, so that a slow reader holds the sources back.
    """

    def __init__(self) -> None:
        self._queue = asyncio.Queue[T | BaseException | None](maxsize=1)
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, source: AsyncGenerator[T, None]) -> None:
        self._tasks.append(asyncio.create_task(self._forward(source)))

    async def items(self) -> AsyncGenerator[T, None]:
        """Yield items until all sources have ended. The first error of one ends them all."""
        num_ended = 0
        try:
            while num_ended < len(self._tasks):
                item = await self._queue.get()
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
                    await self._queue.put(item)
        except Exception as error:
            end = error
        await self._queue.put(end)

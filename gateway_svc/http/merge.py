"""Merges asynchronous generators."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Merge(Generic[T]):
    """Items of several sources, as they come; each source runs in a task of its own.

    Each source has at most one item in the queue, so that a slow reader holds the sources back and
    none is starved by the others. A source that cancels its task, because the reader is too slow
    for it, cancels the reader's task too, which may be in a write to the client.
    """

    def __init__(self) -> None:
        # Items, and what to set when one has been read.
        self._queue = asyncio.Queue[tuple[T | BaseException | None, asyncio.Event]]()
        self._tasks: list[asyncio.Task[None]] = []
        # The task that reads the items; None before, after, and once it has been cancelled.
        self._reader: asyncio.Task[Any] | None = None
        # It waits for an item, and so can read an error.
        self._is_waiting = False

    def add(self, source: AsyncGenerator[T, None]) -> None:
        self._tasks.append(asyncio.create_task(self._forward(source)))

    async def items(self) -> AsyncGenerator[T, None]:
        """Yield items until all sources have ended. The first error of one ends them all."""
        num_ended = 0
        self._reader = asyncio.current_task()
        try:
            while num_ended < len(self._tasks):
                item, was_read = await self._next()
                was_read.set()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_ended += 1
                else:
                    yield item
        finally:
            self._reader = None
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self) -> tuple[T | BaseException | None, asyncio.Event]:
        self._is_waiting = True
        try:
            return await self._queue.get()
        finally:
            self._is_waiting = False

    async def _forward(self, source: AsyncGenerator[T, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await self._put(item).wait()
        except asyncio.CancelledError:
            self._cancel_reader()
            raise
        except Exception as error:
            end = error
            if _is_cancelled() and not (self._is_waiting and self._queue.empty()):
                self._cancel_reader()
        # Not waited for: a source whose reader has ended, and whose task is cancelled, may raise
        # another error than the cancellation.
        self._put(end)

    def _cancel_reader(self) -> None:
        """Cancel the reader's task, once, unless the reader has ended."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _put(self, item: T | BaseException | None) -> asyncio.Event:
        """Queue an item; return what is set when it is read."""
        was_read = asyncio.Event()
        self._queue.put_nowait((item, was_read))
        return was_read


def _is_cancelled() -> bool:
    """Whether this task was cancelled, even if that became another error."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

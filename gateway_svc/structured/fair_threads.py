"""Threads that tenants share: those that wait for one are served round robin."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from quire.service.grammars import RoundRobin

T = TypeVar("T")


class FairThreads:
    """Gives each free thread to the next tenant, and within a tenant to the call that has waited
    longest. For one event loop."""

    def __init__(self, threads: ThreadPoolExecutor, num_threads: int) -> None:
        self._threads = threads
        self._num_free = num_threads
        self._waiting = RoundRobin[asyncio.Future[None]]()

    @asynccontextmanager
    async def hold(self, principal: str) -> AsyncIterator["HeldThread"]:
        """Wait for a thread, which is the caller's during the block."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(principal)
        held = HeldThread(self._threads)
        try:
            yield held
        finally:
            # The work of a cancelled call goes on in the thread.
            if held.work is None or held.work.done():
                self._pass_on()
            else:
                held.work.add_done_callback(lambda work: self._pass_on())

    async def _wait(self, principal: str) -> None:
        given = asyncio.get_running_loop().create_future()
        self._waiting.put(principal, given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a thread to the next call that waits and was not cancelled."""
        while self._waiting:
            given = self._waiting.pop()
            if not given.cancelled():
                given.set_result(None)
                return
        self._num_free += 1


class HeldThread:
    """A thread for one call."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.work: asyncio.Future[Any] | None = None
        self._threads = threads

    async def run(self, work: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self.work = running
        return await asyncio.shield(running)

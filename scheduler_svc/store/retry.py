"""Retries Redis calls while Redis is unavailable."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from scheduler_svc.store.errors import StoreError, StoreUnavailable

log = structlog.get_logger()

RETRY_S = 0.2

_Reply = TypeVar("_Reply")


class RedisRetry:
    """Repeats calls until Redis is available. All calls of a process share one, so that an outage
    is logged once, whatever the number of calls that wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_waiting = 0
        # Since when calls wait, by the clock; None if no outage is logged.
        self._since: float | None = None
        # Of all outages that have ended.
        self._ended_s = 0.0
        # Why the last call that waits has failed; None if none waits.
        self.error: str | None = None

    @property
    def unavailable_s(self) -> float:
        """The time in which calls have waited so far."""
        return self._ended_s + (0.0 if self._since is None else self._clock() - self._since)

    async def __call__(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        """Repeat a call. It may be executed twice."""
        try:
            return await call()
        except StoreUnavailable as error:
            self._log_begin(error)
        self._num_waiting += 1
        try:
            return await self._repeat(call)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                # The last one may have been cancelled.
                self._end()

    async def _repeat(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                reply = await call()
            except StoreUnavailable as error:
                # Another call may have succeeded, for example at another node of a cluster.
                self._log_begin(error)
                continue
            except StoreError:
                # A response, for example that another scheduler leads.
                self._log_end()
                raise
            self._log_end()
            return reply

    def _log_begin(self, error: StoreUnavailable) -> None:
        self.error = str(error)
        if self._since is None:
            self._since = self._clock()
            log.warning("waiting for Redis", reason=str(error))

    def _log_end(self) -> None:
        if self._since is not None:
            log.info("Redis is available again", seconds=round(self._clock() - self._since, 1))
            self._end()

    def _end(self) -> None:
        self._ended_s, self._since, self.error = self.unavailable_s, None, None

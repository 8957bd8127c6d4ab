"""A pool's calls, one at a time, which wait while Redis is away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from scheduler_svc.store.errors import StoreUnavailable

log = structlog.get_logger()

RETRY_S = 0.2

_Reply = TypeVar("_Reply")


class Patience:
    """Asks again until Redis answers. What is asked must bear to be repeated, as a commit does,
    which gets its stored reply."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def ask(self, call: Callable[[], Awaitable[_Reply]]) -> _Reply:
        async with self._turn:
            while True:
                try:
                    return await call()
                except StoreUnavailable as error:
                    log.warning("the lane waits for Redis", error=str(error))
                    await asyncio.sleep(RETRY_S)

"""Retries Redis calls while Redis is unavailable."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import structlog

from scheduler_svc.store.errors import StoreUnavailable

log = structlog.get_logger()

RETRY_S = 0.2

_Reply = TypeVar("_Reply")


async def retry_unavailable(call: Callable[[], Awaitable[_Reply]]) -> _Reply:
    """Repeat a call until Redis is available. A call may be executed twice."""
    try:
        return await call()
    except StoreUnavailable as error:
        log.warning("waiting for Redis", error=str(error))
    while True:
        await asyncio.sleep(RETRY_S)
        with suppress(StoreUnavailable):
            reply = await call()
            log.info("Redis is available again")
            return reply

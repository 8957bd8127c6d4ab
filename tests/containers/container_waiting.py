"""Waiting for containers without blocking the clients on the same event loop."""

import asyncio
import time
from collections.abc import Callable

# Most predicates start a process.
_POLL_S = 0.1


async def until(predicate: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait for a predicate, which is called in a thread; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(predicate):
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        await asyncio.sleep(_POLL_S)

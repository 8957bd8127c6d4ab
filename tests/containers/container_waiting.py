"""Waiting for containers, without holding up the clients that share the event loop."""

import asyncio
import time
from collections.abc import Callable

# Most predicates start a process.
_POLL_S = 0.1


async def until(predicate: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Waits for a predicate, asked in a thread; says what did not come."""
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(predicate):
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        await asyncio.sleep(_POLL_S)

"""Waiting for what other tasks and processes do, instead of sleeping."""

import asyncio
import time
from collections.abc import Callable

_POLL_S = 0.005


async def until(predicate: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait for a predicate; the error of a timeout contains `what`. The limit is for a busy
    machine."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        await asyncio.sleep(_POLL_S)

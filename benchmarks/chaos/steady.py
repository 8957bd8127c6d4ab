"""Waits until a stack has recovered: all parts are up, and every stream makes progress."""

import asyncio
import time

from benchmarks.chaos.stack import ChaosStack, NotSteadyError
from benchmarks.chaos.streams import Streams

_POLL_S = 0.2
# Some faults are detected with a delay.
_STABLE_S = 1.5
_MOST_NAMED = 5


async def wait_until_steady(stack: ChaosStack, streams: Streams, bound_s: float) -> None:
    """Wait until the stack had no problem for a while in which every stream received a message.
    NotSteadyError after `bound_s`."""
    deadline_s = time.monotonic() + bound_s
    stable_since_s: float | None = None
    while True:
        now_s = time.monotonic()
        missing = await asyncio.to_thread(stack.find_problem)
        streams.check()
        stable_since_s = (stable_since_s or now_s) if missing is None else None
        if stable_since_s is not None:
            missing = _still(streams, stable_since_s)
            if missing is None and now_s - stable_since_s >= _STABLE_S:
                return
        if now_s > deadline_s:
            raise NotSteadyError(f"not steady after {bound_s:g} s: {missing or 'not stable'}")
        await asyncio.sleep(_POLL_S)


def _still(streams: Streams, since_s: float) -> str | None:
    still = streams.stalled_since(since_s)
    if not still:
        return None
    named = ", ".join(map(str, still[:_MOST_NAMED]))
    return f"{len(still)} streams have received no message: {named}"

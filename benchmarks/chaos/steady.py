"""When a stack has recovered: all its parts are there, and every stream moves."""

import asyncio
import time

from benchmarks.chaos.stack import ChaosStack, Unsteady
from benchmarks.chaos.streams import Streams

_POLL_S = 0.2
# Some faults are noticed a moment after they happened.
_SETTLED_S = 1.5
_MOST_NAMED = 5


async def wait_until_steady(stack: ChaosStack, streams: Streams, bound_s: float) -> None:
    """Until nothing is missing for a while in which something came on every stream; Unsteady if
    that takes too long."""
    deadline_s = time.monotonic() + bound_s
    settled_s: float | None = None
    while True:
        now_s = time.monotonic()
        missing = await asyncio.to_thread(stack.unsettled)
        streams.check()
        settled_s = (settled_s or now_s) if missing is None else None
        if settled_s is not None:
            missing = _still(streams, settled_s)
            if missing is None and now_s - settled_s >= _SETTLED_S:
                return
        if now_s > deadline_s:
            raise Unsteady(f"not steady after {bound_s:g} s: {missing or 'it changes'}")
        await asyncio.sleep(_POLL_S)


def _still(streams: Streams, since_s: float) -> str | None:
    still = streams.unmoved_since(since_s)
    if not still:
        return None
    named = ", ".join(map(str, still[:_MOST_NAMED]))
    return f"nothing has come on {len(still)} streams: {named}"

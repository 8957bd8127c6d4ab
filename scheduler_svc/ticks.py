"""Aligns the periodic work of a process.

What is due at the same tick runs in one iteration of the event loop: a process that is woken up has
to fetch its code and data into the caches again, which takes longer than most of this work.
"""

import asyncio
import secrets
from typing import Final

_TICK_MS: Final = 250
# The processes of a machine do not all wake up together.
_PHASE_MS: Final = secrets.randbelow(_TICK_MS)


async def sleep_ticks(interval_s: float) -> None:
    """Sleep until the last tick within the interval: never for longer, because others count on it
    that leases are tried and heartbeats sent in time. An interval shorter than a tick is exact."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(until_tick(interval_s, loop.time()))


def until_tick(interval_s: float, now_s: float) -> float:
    """Seconds that `sleep_ticks` sleeps; `now_s` is of the loop's clock."""
    interval_ms = round(1000 * interval_s)
    if interval_ms < _TICK_MS:
        return interval_s
    since_tick_ms = (round(1000 * now_s) - _PHASE_MS) % _TICK_MS
    num_ticks = (since_tick_ms + interval_ms) // _TICK_MS
    return (num_ticks * _TICK_MS - since_tick_ms) / 1000

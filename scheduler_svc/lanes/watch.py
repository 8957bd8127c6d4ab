"""Finds workers that are stopped, cut off or stuck: their streams break no other way."""

import asyncio
import time
from collections.abc import Callable

from scheduler_svc.lanes.stream import LaneLost, WorkerSilent, WorkerStream

INTERVAL_S = 0.25
# Workers send a heartbeat each second.
SILENCE_S = 3.0


async def watch(
    stream: WorkerStream,
    oldest_sent_at: Callable[[], float | None],
    step_timeout_s: float,
    on_lost: Callable[[], None],
) -> None:
    """Loses the stream when the worker has been silent for too long, or has had a plan for
    `step_timeout_s`. `oldest_sent_at`: when the oldest plan without a result was sent, by
    time.perf_counter; None without one."""
    while stream.lost is None:
        before = time.monotonic()
        await asyncio.sleep(INTERVAL_S)
        if time.monotonic() - before > INTERVAL_S + SILENCE_S / 2:
            # It was this process that stood still.
            stream.listen_anew()
        elif stream.silent_s > SILENCE_S:
            stream.lose(WorkerSilent(f"it has been silent for {stream.silent_s:.1f} s"))
        elif (sent_at := oldest_sent_at()) and time.perf_counter() - sent_at > step_timeout_s:
            stream.lose(LaneLost(f"it has not finished a step in {step_timeout_s:g} s"))
    on_lost()

"""Ends calls just before their deadlines, with an error that says what they waited for."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import grpc

from gateway_svc.scheduler.outages import Outage, Outages
from quire.service.errors import RequestError, failed

# The error has to arrive before the client's own timer ends the call without a reason.
_MARGIN_S: Final = 0.1
# Of a short deadline; the rest is the request's.
_MARGIN_SHARE: Final = 0.1
# Shorter waits are not worth mentioning.
_LEAST_S: Final = 0.05


@asynccontextmanager
async def ended_at_deadline(remaining_s: float | None, outages: Outages) -> AsyncIterator[None]:
    """End the body shortly before `remaining_s` seconds have passed, as a disconnected client
    would, and raise DEADLINE_EXCEEDED. None: no deadline."""
    if remaining_s is None:
        yield
        return
    began_at, before = time.monotonic(), outages.seconds()
    margin_s = min(_MARGIN_S, _MARGIN_SHARE * remaining_s)
    try:
        async with asyncio.timeout(remaining_s - margin_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        after = outages.seconds()
        waits = {outage: after[outage] - before[outage] for outage in Outage}
        raise _exceeded(time.monotonic() - began_at, waits) from None


def _exceeded(total_s: float, waits: Mapping[Outage, float]) -> RequestError:
    running_s = total_s - sum(waits.values())
    parts = [
        *(f"waited {seconds:.1f} s for {outage.value}" for outage, seconds in waits.items()
          if seconds >= _LEAST_S),
        f"was queued or ran for {running_s:.1f} s",
    ]  # fmt: skip
    message = f"the call's deadline expired: the request {', '.join(parts)}"
    return failed(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", message)

"""The lead, held for a while at a time: a leader that could not renew it says nothing."""

import asyncio
import math
import time

import structlog

from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.store import Store

log = structlog.get_logger()

# Of the lease: how often it is renewed, and how long after a renewal it is certain that nobody else
# has the lead. The rest is for clocks that do not run alike, and for what is on its way.
RENEWAL = 1 / 6
CERTAIN = 2 / 3


class WritesLost(Exception):
    """Redis may have lost what was written last: it was started anew, or emptied."""


class TenureOver(Exception):
    """Nothing may be sent any more."""


class Tenure:
    """Renewed by `run`. `lease_s` is counted by Redis' clock, its certain part by ours."""

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store = store
        self._interval_s = lease_s * RENEWAL
        self._certain_s = lease_s * CERTAIN
        self._run_id: str | None = None
        self._until = time.monotonic() + self._certain_s
        self._is_over = False
        # Renewed, or over.
        self._changed = asyncio.Event()
        # Why it could not be renewed; None when it was.
        self.trouble: str | None = None

    @property
    def is_held(self) -> bool:
        """For certain: something may be sent."""
        return time.monotonic() < self._until

    async def held(self) -> None:
        """Returns when something may be sent. TenureOver if nothing will."""
        while not self.is_held:
            if self._is_over:
                raise TenureOver
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> None:
        """Whoever waits to send something need not wait."""
        self._is_over = True
        self._until = -math.inf
        self._changed.set()

    async def run(self) -> None:
        """Renews it until somebody else leads (StaleEpoch), or writes are lost (WritesLost, and
        LeadLost where not even the lead is left)."""
        while True:
            await self._renew()
            await asyncio.sleep(self._interval_s)

    async def _renew(self) -> None:
        began_at = time.monotonic()
        try:
            renewal = await self._store.renew()
        except StoreUnavailable as error:
            self.trouble = str(error)
            return
        if self._run_id not in (None, renewal.run_id):
            raise WritesLost("Redis was started anew")
        self._run_id = renewal.run_id
        self._until = began_at + self._certain_s
        self.trouble = None
        self._changed.set()

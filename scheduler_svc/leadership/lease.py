"""Renews the leadership lease; output is suppressed while the lease may have expired."""

import asyncio
import math
import time

from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.leadership import LeaseStore
from scheduler_svc.ticks import sleep_ticks

# Fractions of the lease: the interval between renewals, and the time after a renewal for which it
# is certain that no other scheduler leads. The rest allows for clock drift and output in transit.
RENEWAL_INTERVAL = 1 / 4
SAFE_FRACTION = 2 / 3


class WritesLost(Exception):
    """Redis may have lost its last writes: it was restarted or emptied."""


class LeaseExpired(Exception):
    """The term is over; no output may be sent."""


class Lease:
    """The lease of one term. Redis' clock counts `lease_s`, this process's the safe part of it."""

    def __init__(self, store: LeaseStore, lease_s: float) -> None:
        self._store = store
        self._interval_s = lease_s * RENEWAL_INTERVAL
        self._safe_s = lease_s * SAFE_FRACTION
        self._run_id: str | None = None
        self._safe_until = time.monotonic() + self._safe_s
        self._is_ended = False
        # Whether something but Redis shows another leader, since the last renewal.
        self._is_doubtful = False
        # Set when the lease is renewed or ended.
        self._changed = asyncio.Event()
        # Why the last renewal failed; None if it succeeded.
        self.error: str | None = None

    @property
    def is_held(self) -> bool:
        """Whether the lease has certainly not expired: output may be sent."""
        return time.monotonic() < self._safe_until

    async def wait_held(self) -> None:
        """Wait until output may be sent. LeaseExpired if the lease has ended."""
        while not self.is_held:
            if self._is_ended:
                raise LeaseExpired
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> None:
        """End the lease: `wait_held` raises from now on."""
        self._is_ended = True
        self._safe_until = -math.inf
        self._changed.set()

    def doubt(self) -> None:
        """A worker has another leader, for which Redis is available. `run` raises StaleEpoch if it
        cannot renew the lease before this one expires."""
        self._is_doubtful = True

    async def run(self) -> None:
        """Renew until another scheduler leads (StaleEpoch) or writes are lost (WritesLost, or
        LeadershipLost if the lease itself is lost)."""
        while True:
            await self._renew()
            if self._is_doubtful and not self.is_held:
                raise StaleEpoch(f"a worker has another leader; {self.error}")
            await sleep_ticks(self._interval_s)

    async def _renew(self) -> None:
        started_at = time.monotonic()
        try:
            run_id = await self._store.renew()
        except StoreUnavailable as error:
            self.error = str(error)
            return
        if self._run_id not in (None, run_id):
            raise WritesLost("Redis was restarted, or another server serves the keys now")
        self._run_id = run_id
        self._safe_until = started_at + self._safe_s
        self._is_doubtful = False
        self.error = None
        self._changed.set()

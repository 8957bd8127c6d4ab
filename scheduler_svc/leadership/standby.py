"""Competes for leadership while another scheduler leads."""

import asyncio
import time

import structlog

from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.leadership import Leadership, LeaseStore

log = structlog.get_logger()

TRY_INTERVAL_S = 0.25


class Standby:
    """A scheduler that does not lead: it polls the lease and acquires it once it is free."""

    def __init__(self, store: LeaseStore, address: str, lease_s: float) -> None:
        self._store = store
        self._address = address
        self._lease_s = lease_s
        # The leader's address as last read; empty if unknown.
        self.leader_address = ""
        # Why Redis failed the last call; None if it did not.
        self.redis_error: str | None = "not connected yet"
        # After an outage of Redis or the loss of the lease's entry the old leader has precedence.
        self._not_before = 0.0
        self._has_seen_leader = False
        self._has_lost_redis = False

    async def acquire(self) -> Leadership:
        """Wait until the lease is acquired."""
        while True:
            leadership = await self._try_acquire()
            if leadership is not None:
                return leadership
            await asyncio.sleep(TRY_INTERVAL_S)

    async def reacquire(self) -> Leadership | None:
        """Acquire the lease again after Redis lost writes; None if another scheduler leads."""
        while True:
            try:
                return await self._store.reacquire(self._address)
            except StaleEpoch:
                return None
            except StoreUnavailable as error:
                self.redis_error = str(error)
                await asyncio.sleep(TRY_INTERVAL_S)

    async def _try_acquire(self) -> Leadership | None:
        try:
            address = await self._store.leader_address()
            if self._has_seen_leader and (address is None or self._has_lost_redis):
                self._not_before = time.monotonic() + 2 * self._lease_s
            self._has_lost_redis = False
            self._has_seen_leader = address is not None
            self.leader_address = address or ""
            self.redis_error = None
            if time.monotonic() < self._not_before:
                return None
            return await self._store.acquire(self._address, round(self._lease_s * 1000))
        except StoreUnavailable as error:
            self._has_lost_redis = True
            if self.redis_error != str(error):
                # Logged once, not at every attempt.
                self.redis_error = str(error)
                log.error("Redis unavailable", why=self.redis_error)
            return None

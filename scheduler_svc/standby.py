"""Waits for the lead."""

import asyncio
import time

import structlog

from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.leadership import Leadership
from scheduler_svc.store.store import Store

log = structlog.get_logger()

TRY_INTERVAL_S = 0.25


class Standby:
    """A scheduler that does not lead. It tries again and again, and takes the lead where nobody
    has it."""

    def __init__(self, store: Store, address: str, lease_s: float) -> None:
        self._store = store
        self._address = address
        self._lease_s = lease_s
        # Where the leader is, as far as it is known; empty if it is not.
        self.leader_address = ""
        # Why Redis cannot be asked; None when it can.
        self.trouble: str | None = "not asked yet"
        # The leader goes first when Redis comes back, or has lost the lead's entry.
        self._not_before = 0.0
        self._has_seen_leader = False
        self._has_lost_redis = False

    async def won(self) -> Leadership:
        """Returns with the lead."""
        while True:
            leadership = await self._try()
            if leadership is not None:
                return leadership
            await asyncio.sleep(TRY_INTERVAL_S)

    async def won_again(self) -> Leadership | None:
        """For a leader whose entry is lost with Redis' last writes; None if another one leads."""
        while True:
            try:
                return await self._store.retake_lead(self._address)
            except StaleEpoch:
                return None
            except StoreUnavailable as error:
                self.trouble = str(error)
                await asyncio.sleep(TRY_INTERVAL_S)

    async def _try(self) -> Leadership | None:
        try:
            leader = await self._store.leader()
            if self._has_seen_leader and (leader is None or self._has_lost_redis):
                self._not_before = time.monotonic() + 2 * self._lease_s
            self._has_lost_redis = False
            self._has_seen_leader = leader is not None
            self.leader_address = leader.address if leader else ""
            self.trouble = None
            if time.monotonic() < self._not_before:
                return None
            return await self._store.take_lead(self._address, round(self._lease_s * 1000))
        except StoreUnavailable as error:
            self._has_lost_redis = True
            if self.trouble != str(error):
                # Said once, not at every try.
                self.trouble = str(error)
                log.error("no Redis", why=self.trouble)
            return None

"""Competes for leadership while another scheduler leads.

It polls the lease, and watches the leader's process, whose end frees the lease early.
"""

import asyncio
import contextlib
import time

import structlog

from quire.service.tls import TLS
from scheduler_svc.leadership.leader_watch import LeaderWatch
from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.leadership import Leadership, LeaseStore, StoredLeader

log = structlog.get_logger()

TRY_INTERVAL_S = 0.25


class Standby:
    """A scheduler that does not lead: it polls the lease and acquires it once it is free."""

    def __init__(
        self, store: LeaseStore, address: str, lease_s: float, peer_tls: TLS | None = None
    ) -> None:
        """`peer_tls` is for connections to the leader."""
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
        self._watch = LeaderWatch(peer_tls, self._on_lost)
        # The leader that has ended last, and the event that another one has.
        self._lost_leader: StoredLeader | None = None
        self._is_lost = asyncio.Event()

    @property
    def watches_leader(self) -> bool:
        """Whether the end of the leader's process would be noticed before its lease expires."""
        return self._watch.is_watching

    async def acquire(self) -> Leadership:
        """Wait until the lease is acquired."""
        try:
            while True:
                self._is_lost.clear()
                leadership = await self._try_acquire()
                if leadership is not None:
                    return leadership
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TRY_INTERVAL_S):
                        await self._is_lost.wait()
        finally:
            self._watch.stop()

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
            leader = await self._store.leader()
            if self._has_seen_leader and (leader is None or self._has_lost_redis):
                self._not_before = time.monotonic() + 2 * self._lease_s
            self._has_lost_redis = False
            self._has_seen_leader = leader is not None
            self.leader_address = leader.address if leader else ""
            self.redis_error = None
            if leader is not None and leader.address not in ("", self._address):
                self._watch.watch(leader)
            if time.monotonic() < self._not_before:
                return None
            lost_epoch = leader.epoch if leader and leader == self._lost_leader else None
            lease_ms = round(self._lease_s * 1000)
            return await self._store.acquire(self._address, lease_ms, lost_epoch)
        except StoreUnavailable as error:
            self._has_lost_redis = True
            if self.redis_error != str(error):
                # Logged once, not at every attempt.
                self.redis_error = str(error)
                log.error("Redis unavailable", why=self.redis_error)
            return None

    def _on_lost(self, leader: StoredLeader) -> None:
        self._lost_leader = leader
        self._is_lost.set()

"""Competes for the leadership of a shard while another scheduler leads it.

It polls the lease, and watches the leader's process, whose end frees the lease early.
"""

import asyncio
import contextlib
import time

import structlog

from quire.service.tls import TLS
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.leadership.leader_watch import LeaderWatch
from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.leadership import Leadership, LeaseStore, StoredLeader
from scheduler_svc.ticks import until_tick

log = structlog.get_logger()

TRY_INTERVAL_S = 0.25
# A lease that is free is left for so long to the scheduler that should lead, which may have started
# just now and learn only by its next attempt that the lease is free.
YIELD_S = TRY_INTERVAL_S


class Standby:
    """A scheduler that does not lead: it polls the lease and acquires it once it is free."""

    def __init__(
        self,
        store: LeaseStore,
        address: str,
        lease_s: float,
        peer_tls: TLS | None,
        membership: Membership,
        shard: int,
    ) -> None:
        """`peer_tls` is for connections to the leader."""
        self._store = store
        self._membership = membership
        self._shard = shard
        # Since when the lease is known to be free and left to another scheduler, of time.monotonic;
        # None if it is not.
        self._free_since: float | None = None
        self._address = address
        self._lease_s = lease_s
        # The leader's address as last read; that of the scheduler that should follow, if the leader
        # has ended or released the lease; empty if unknown.
        self.leader_address = ""
        # Why Redis failed the last call; None if it did not.
        self.redis_error: str | None = "not connected yet"
        # Why Redis has failed calls since the last one that succeeded.
        self._reasons: set[str] = set()
        # After an outage of Redis or the loss of the lease's entry the old leader has precedence.
        self._not_before = 0.0
        # `_lost_leader` has ended since then.
        self._is_lost_since = False
        self._has_seen_leader = False
        self._has_lost_redis = False
        self._watch = LeaderWatch(peer_tls, self._on_lost)
        # It sleeps without a timer: the end of the leader would be noticed, or others stand by, and
        # heartbeats, which also fail without Redis, report everything else.
        self._is_idle = False
        # As of the last attempt; one that stands by no longer must not keep its connection.
        self._stands_by = False
        self._leader: StoredLeader | None = None  # as last read
        self._lost_leader: StoredLeader | None = None  # the one that has ended last
        # Set when another one has, or the lease has to be read, or may be acquired now.
        self._is_due = asyncio.Event()

    async def acquire(self) -> Leadership:
        """Wait until the lease is acquired."""
        self._free_since = None
        membership = self._membership
        membership.listen(self._check_need)
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._is_due.clear()
                leadership = None
                self._stands_by = membership.is_candidate(self._shard)
                if not self._stands_by:
                    self._leave_to_others()
                elif self._is_needed:
                    leadership = await self._try_acquire()
                if leadership is not None:
                    return leadership
                self._is_idle = not self._is_needed
                is_known = membership.is_known
                # Until the map is known, only the event that it is ends the sleep.
                has_timer = not self._is_idle or not is_known.is_set()
                within_s = until_tick(TRY_INTERVAL_S, loop.time()) if has_timer else None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await (self._is_due if is_known.is_set() else is_known).wait()
        finally:
            membership.stop_listening(self._check_need)
            self._watch.stop()

    @property
    def _is_needed(self) -> bool:
        """Whether the lease has to be read: otherwise the end of the leader would be noticed, or
        others stand by."""
        return self._membership.is_candidate(self._shard) and not (
            self._watch.is_watching and self._membership.is_led(self._shard)
        )

    def _check_need(self) -> None:
        """After a heartbeat, or a change of the map."""
        if not self._membership.is_candidate(self._shard):
            self.leader_address = self._membership.leader_of(self._shard)
            if self._stands_by:
                self._is_due.set()
        elif self._is_idle and self._is_needed:
            self._is_due.set()
        elif self._free_since is not None and self._membership.is_owner(self._shard):
            # The one that it was left to has ended, too.
            self._is_due.set()
        elif self._is_known_to_have_ended:
            self._is_due.set()

    @property
    def _is_known_to_have_ended(self) -> bool:
        """Whether the leader that was last read has ended, which the standby of another shard has
        noticed: this one may just have started, and not watch it yet."""
        leader = self._leader
        return (
            leader is not None
            and leader.holder != b""
            and leader != self._lost_leader
            and self._membership.has_ended(leader.address, leader.epoch)
        )

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
            self._note(leader)
            if self._has_precedence(leader) or not self._membership.is_known.is_set():
                return None
            lease_s = self._lease_s
            if not self._membership.is_owner(self._shard):
                if self._must_yield(leader):
                    return None
                # An expired lease is left to its owner for as long.
                lease_s += YIELD_S
            lost_epoch = leader.epoch if leader and leader == self._lost_leader else None
            return await self._store.acquire(self._address, round(lease_s * 1000), lost_epoch)
        except StoreUnavailable as error:
            self._has_lost_redis = True
            self.redis_error = str(error)
            if self.redis_error not in self._reasons:
                # Logged once, not at every attempt: reasons may alternate.
                self._reasons.add(self.redis_error)
                log.error("Redis unavailable", shard=self._shard, reason=self.redis_error)
            return None

    def _note(self, leader: StoredLeader | None) -> None:
        """Note the leader that was read, and that Redis has responded."""
        self._leader = leader
        if self._is_known_to_have_ended:
            self._lost_leader, self._is_lost_since = leader, True
        if not self._is_free(leader):
            self._free_since = None
        if self._has_seen_leader and (leader is None or self._has_lost_redis):
            self._not_before = time.monotonic() + 2 * self._lease_s
            self._is_lost_since = False
        self._has_lost_redis = False
        self._has_seen_leader = leader is not None
        self.leader_address = self._leader_or_next(leader)
        self.redis_error = None
        self._reasons.clear()
        if leader is not None and leader.address not in ("", self._address):
            self._watch.watch(leader)

    def _is_free(self, leader: StoredLeader | None) -> bool:
        """Whether the leader has released the lease or has ended; the lease may expire as well."""
        return leader is None or not leader.holder or leader == self._lost_leader

    def _leader_or_next(self, leader: StoredLeader | None) -> str:
        if leader is None:
            return ""
        is_free = self._is_free(leader)
        return self._membership.owner_address(self._shard) if is_free else leader.address

    def _has_precedence(self, leader: StoredLeader | None) -> bool:
        """Whether a leader may still come back with what Redis has lost in an outage: not if this
        one, the last that Redis has, has ended since."""
        if time.monotonic() >= self._not_before:
            return False
        lost = self._lost_leader if self._is_lost_since else None
        return leader is None or lost is None or leader.epoch != lost.epoch

    def _leave_to_others(self) -> None:
        """Learn of the leader from the others: enough schedulers stand by for this shard."""
        self._watch.stop()
        self.leader_address = self._membership.leader_of(self._shard)
        self.redis_error = None

    def _must_yield(self, leader: StoredLeader | None) -> bool:
        """Whether the lease was found to be free just now, so that its owner may acquire it."""
        if not self._is_free(leader):
            return False
        now = time.monotonic()
        self._free_since = now if self._free_since is None else self._free_since
        return now - self._free_since < YIELD_S

    def _on_lost(self, leader: StoredLeader, has_ended: bool) -> None:
        if has_ended:
            self._membership.mark_ended(leader.address)
        self._lost_leader = leader
        self.leader_address = self._membership.owner_address(self._shard)
        self._is_lost_since = True
        self._is_due.set()

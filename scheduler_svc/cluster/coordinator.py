"""Decides the map of the cluster. A part of the term of shard 0's leader."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import structlog

from quire.service.addresses import can_connect
from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.hand_overs import HandOvers
from scheduler_svc.cluster.heartbeats import HEARTBEAT_S
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.cluster.worker_addresses import WorkerAddresses
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.store import Store
from scheduler_svc.ticks import sleep_ticks

log = structlog.get_logger()

# A scheduler gets shards of others when it has run for this long: one that crashes again and again
# must not make them pause each time.
JOIN_S = 2.0
# One that starts meanwhile makes it wait no longer than this.
MAX_JOIN_S = 10.0
# A worker keeps its shard for this long after its name has ceased to resolve: a container that is
# restarted has no name meanwhile.
KEEP_WORKER_S = 10.0
# A scheduler that has not taken a shard within this time, because it was stopped for a moment, is
# offered it again. Not at once: one that cannot take it must not make it pause again and again.
OFFER_AGAIN_S = 10.0


class Coordinator:
    """Writes a new map when schedulers, workers or the number of shards change."""

    def __init__(
        self,
        membership: Membership,
        store: Store,
        addresses: WorkerAddresses,
        clock: Callable[[], float] = time.monotonic,
        is_reachable: Callable[[str], Awaitable[bool]] = can_connect,
    ) -> None:
        """`is_reachable`: whether a server listens at an address."""
        self._is_reachable = is_reachable
        self._membership = membership
        self._store = store
        self._addresses = addresses
        self._clock = clock
        self._started_at = started_at = clock()
        # When the map has last changed.
        self._changed_at = started_at
        # Schedulers that may get shards; those of the map were there before.
        self._joined = {membership.id, *membership.map.owners.values()}
        # Schedulers that have been reached at their addresses. Gateways could not use another one.
        self._reached: set[str] = set()
        # By id, when a scheduler was first seen.
        self._first_seen = dict.fromkeys(self._joined, started_at - JOIN_S)
        # By address, when a worker's name has last resolved.
        self._last_seen = dict.fromkeys(membership.map.workers, started_at)
        self._hand_overs = HandOvers(clock)
        # The last map that was sent to Redis. Without a reply it may have been read by others.
        self._sent = membership.map
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Update the map until cancelled. Errors of the store but StoreUnavailable are raised."""
        # What Redis has may be older: it may have lost writes, or the last leader its last one.
        is_written = False
        while True:
            try:
                is_lost = self._membership.is_map_lost
                await self._update(None, is_forced=is_lost or not is_written)
                is_written = True
            except StoreUnavailable:
                is_written = False
            await sleep_ticks(HEARTBEAT_S)

    async def _reach_new(self) -> None:
        """Connect to the schedulers that have not joined yet."""
        new = {
            name: address
            for name, address in self._membership.members.items()
            if name not in self._joined | self._reached
        }
        found = await asyncio.gather(*map(self._is_reachable, new.values()))
        self._reached |= {name for name, is_reached in zip(new, found, strict=True) if is_reached}

    async def set_num_shards(self, num_shards: int, prepare: Callable[[], Awaitable[None]]) -> None:
        """Raise the number of shards, after `prepare`. Raises errors of the store."""
        if num_shards > self._membership.map.num_shards:
            await prepare()
            await self._update(num_shards)
            log.info("shards added", shards=num_shards)

    async def _update(self, num_shards: int | None, is_forced: bool = False) -> None:
        await self._reach_new()
        async with self._lock:
            present = self._membership.map
            leaders = self._present_leaders(present)
            loads = self._membership.loads
            # What a scheduler has taken from one that ended goes to one that returns: the streams
            # of its other shards have not paused, and need not.
            epochs = {shard: load.epoch for shard, load in enumerate(loads)}
            planned = present.next(
                self._joined_members(leaders), self._known_workers(), num_shards, leaders, epochs
            )
            following = self._hand_overs.limit(present, planned, self._leading(), loads)
            if following is present and self._must_offer_again(present, leaders):
                following = replace(present, version=present.version + 1)
            if self._membership.is_map_lost and not present.version:
                # Above that of the map that was lost: others may remember it.
                following = replace(following, version=self._membership.now_ms)
            if following.version <= self._sent.version and following != self._sent:
                # Others ignore another map of a version that they have read.
                following = replace(following, version=self._sent.version + 1)
            if following is not present:
                self._changed_at = self._clock()
            elif not (is_forced and present.version):
                return
            self._sent = following
            written_ms = await self._store.write_map(following.pack())
            self._membership.set_map(following, written_ms)
            log_change(present, following)

    def _must_offer_again(self, present: ClusterMap, leaders: Mapping[int, str]) -> bool:
        """Whether a scheduler that runs has not taken a shard that the map gave to it long ago."""
        members = self._membership.members
        return self._clock() - self._changed_at >= OFFER_AGAIN_S and any(
            owner in members and leaders.get(shard, owner) != owner
            for shard, owner in present.owners.items()
        )

    def _present_leaders(self, present: ClusterMap) -> dict[int, str]:
        """The schedulers that lead the shards; of a shard whose leader has ended, the one that is
        taking over; of one without a leader, its owner, and also while a map is new: its hand-overs
        are under way, and another plan would add some."""
        membership = self._membership
        leaders = {
            shard: membership.owner_of(shard) if load.leader else present.owners.get(shard, "")
            for shard, load in enumerate(membership.loads)
        } | self._leading()
        if membership.map_age_s < OFFER_AGAIN_S:
            leaders |= {n: name for n, name in present.owners.items() if name in membership.members}
        if membership.map_age_s >= self._clock() - self._started_at:
            # This shard is not given to anyone yet since it was taken.
            leaders[0] = membership.id
        return leaders

    def _leading(self) -> dict[int, str]:
        """By shard, the id of its leader, if this one runs."""
        ids = {address: name for name, address in self._membership.members.items()}
        loads = self._membership.loads
        return {shard: ids[load.leader] for shard, load in enumerate(loads) if load.leader in ids}

    def _joined_members(self, leaders: Mapping[int, str]) -> list[str]:
        """The schedulers that were reached and have run for long enough, or have shards already.
        Those that start together join together, so that shards move once; one that has taken over
        a shard keeps it."""
        now = self._clock()
        members = self._membership.members
        self._first_seen = {name: self._first_seen.get(name, now) for name in members}
        ages = {name: now - since for name, since in self._first_seen.items()}
        self._joined &= members.keys()
        self._reached &= members.keys()
        self._joined |= self._reached & set(leaders.values())
        joining = [age for name, age in ages.items() if name not in self._joined]
        if joining and (min(joining) >= JOIN_S or max(joining) >= MAX_JOIN_S):
            self._joined |= {name for name in self._reached if ages[name] >= JOIN_S}
        return list(self._joined)

    def _known_workers(self) -> list[str]:
        now = self._clock()
        self._last_seen.update(dict.fromkeys(self._addresses.all, now))
        self._last_seen = {
            address: seen_at
            for address, seen_at in self._last_seen.items()
            if now - seen_at < KEEP_WORKER_S
        }
        return list(self._last_seen)


def log_change(present: ClusterMap, following: ClusterMap) -> None:
    """Log which shards get other leaders, and how many workers move."""
    given = {
        shard: owner
        for shard, owner in following.owners.items()
        if present.owners.get(shard) not in (None, owner)
    }
    num_moved = sum(
        present.workers.get(address, shard) != shard for address, shard in following.workers.items()
    )
    if given or num_moved:
        log.info("shards redistributed", shards_given=given, workers_moved=num_moved)

"""What one scheduler process knows of the cluster: the others, the loads of shards, and the map."""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping

import structlog

from scheduler_svc.cluster.cluster_map import ClusterMap, assign_owners
from scheduler_svc.cluster.heartbeats import HEARTBEAT_S, Heartbeats
from scheduler_svc.cluster.load import LoadCodec, ShardLoad
from scheduler_svc.cluster.map_reader import MapReader
from scheduler_svc.cluster.spread import weight
from scheduler_svc.store.cluster import ClusterReading, ClusterStore
from scheduler_svc.store.errors import StoreError
from scheduler_svc.ticks import until_tick

log = structlog.get_logger()

# A leader that has sent no heartbeat for this long may have lost its lease.
LED_S = 1.0
# Schedulers that stand by for a shard, besides its owner.
NUM_STANDBYS = 2


class Membership:
    """This process's place among the schedulers, renewed and read several times a second.

    An error in what it knows costs pauses and loses nothing: a shard's lease decides who leads it,
    and a worker serves one leader at a time.
    """

    def __init__(
        self,
        store: ClusterStore,
        address: str,
        expiry_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expiry_s`: as of `Heartbeats`."""
        self.id = secrets.token_hex(8)
        # Set once Redis was read, and has a map that can be used, or none yet.
        self.is_known = asyncio.Event()
        self._store = store
        self._expiry_s = expiry_s
        self._clock = clock
        self._heartbeats = Heartbeats(self.id, address, expiry_s, clock)
        self._owners: Mapping[int, str] = {0: self.id}
        # By shard, `_candidates`, as long as neither the members nor the map change.
        self._known_candidates: dict[int, list[str]] = {}
        self._candidates_map = self._owners_map = ClusterMap()
        self._candidates_members: Mapping[str, str] = {}
        self._owners_members: Mapping[str, str] = {}
        self._loads: Mapping[int, ShardLoad] = {}
        # `loads`, until the next reading.
        self._listed: list[ShardLoad] = []
        self._codec = LoadCodec()
        self._read_loads: dict[int, Callable[[], ShardLoad | None]] = {}
        self._maps = MapReader()
        # When it became the one in use, by `clock`.
        self._map_since = -math.inf
        # By Redis' clock in milliseconds: a scheduler with a later heartbeat has read it.
        self._map_since_ms = 0
        # Why the last heartbeat failed; None if it did not.
        self.why_silent: str | None = None
        # Why heartbeats have failed since the last one.
        self._reasons: set[str] = set()
        # Heartbeats that have begun, and the one of the last reading.
        self._num_begun = 0
        self._last_read = 0
        self._listeners: set[Callable[[], None]] = set()
        # Loads to write in the next heartbeat are due now.
        self._wake = asyncio.Event()

    @property
    def address(self) -> str:
        """Where this scheduler is; empty once it drains."""
        return self._heartbeats.own_address

    @property
    def members(self) -> Mapping[str, str]:
        """The addresses of the schedulers that run, by id; without this one once it drains."""
        return self._heartbeats.members

    @property
    def loads(self) -> list[ShardLoad]:
        """The load of each shard; an empty one for a shard without a leader."""
        if len(self._listed) != self.map.num_shards:
            empty = ShardLoad()
            self._listed = [self._loads.get(shard, empty) for shard in range(self.map.num_shards)]
        return self._listed

    def leader_of(self, shard: int) -> str:
        """The address of the shard's leader; if none runs, of the scheduler that should lead."""
        leader = self._loads[shard].leader if shard in self._loads else ""
        return leader if leader in self.members.values() else self.owner_address(shard)

    @property
    def map(self) -> ClusterMap:
        return self._maps.map

    @property
    def map_age_s(self) -> float:
        """Time since the map has changed; infinite for the first one that was read."""
        return self._clock() - self._map_since

    @property
    def is_map_lost(self) -> bool:
        """Whether Redis has no map, or one that cannot be read, though there was one."""
        return self._maps.is_lost

    @property
    def problem(self) -> str | None:
        """Why this scheduler does not know the cluster, or others do not know it; None if not."""
        return self.why_silent or self._maps.problem

    @property
    def now_ms(self) -> int:
        """The time by Redis' clock; 0 before the first reading."""
        return self._heartbeats.now_ms

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this after each heartbeat, also a failed one, and when the map changes."""
        self._listeners.add(listener)

    def stop_listening(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def lead(self, shard: int, load: Callable[[], ShardLoad | None]) -> None:
        """This process leads the shard; its load is written with every heartbeat. `load` returns
        None while the lease may have expired."""
        self._read_loads[shard] = load
        self._wake.set()

    def beat_soon(self) -> None:
        """Send the next heartbeat at once: a load is news to others."""
        self._wake.set()

    def stop_leading(self, shard: int) -> None:
        self._read_loads.pop(shard, None)

    def is_owner(self, shard: int) -> bool:
        """Whether this process should lead the shard."""
        return self.id == self.owner_of(shard)

    def owner_address(self, shard: int) -> str:
        """The address of the scheduler that should lead the shard; empty if there is none."""
        return self.members.get(self.owner_of(shard), "")

    def owner_of(self, shard: int) -> str:
        """The id of the scheduler that should lead the shard, given which schedulers run; empty if
        there is none. If the one in the map has ended, it is one of those that stand by for the
        shard. All find the same one without asking each other."""
        named = self.map.owners.get(shard, "")
        if named in self.members:
            return named
        candidates, owner = self._candidates(shard), self._owners.get(shard, "")
        if owner and owner not in candidates:
            owner = candidates[0] if candidates else ""
        return owner

    def is_candidate(self, shard: int) -> bool:
        """Whether this process stands by for the shard, or should lead it."""
        return self.id in self._candidates(shard)

    def _candidates(self, shard: int) -> list[str]:
        """The scheduler that should lead the shard by the map, while it runs, and `NUM_STANDBYS`
        others: the cost of standing by does not grow with the number of schedulers."""
        members = self.members
        if self._candidates_map is not self.map or self._candidates_members is not members:
            self._candidates_map, self._candidates_members = self.map, members
            self._known_candidates.clear()
        if (known := self._known_candidates.get(shard)) is not None:
            return known
        named = self.map.owners.get(shard)
        others = sorted(
            (name for name in members if name != named),
            key=lambda name: weight(str(shard), name),
            reverse=True,
        )
        found = others[:NUM_STANDBYS]
        if named is not None and named in members:
            found.insert(0, named)
        self._known_candidates[shard] = found
        return found

    def is_led(self, shard: int) -> bool:
        """Whether the leader has just written the shard's load: its lease need not be read."""
        load, age_ms = self._loads.get(shard), self._heartbeats.load_age_ms(shard)
        if load is None or age_ms is None or self._heartbeats.has_ended(load.leader):
            return False
        return age_ms < LED_S * 1000

    def should_hand_over(self, shard: int, led_since: int) -> bool:
        """Whether the map, since this version, has given the shard to another scheduler, which
        runs, and has sent a heartbeat since: it has read this map, and takes the shard at once."""
        owner = self.map.owners.get(shard, self.id)
        if self.map.version <= led_since or owner == self.id or owner not in self.members:
            return False
        return self._heartbeats.has_sent_since(owner, self._map_since_ms)

    def has_ended(self, address: str, since_ms: int) -> bool:
        """Whether the process that has run at this address since then is known to have ended."""
        return self._heartbeats.has_ended(address, since_ms)

    def mark_ended(self, address: str) -> None:
        """The process at this address has ended: it counts no more, until it sends a heartbeat."""
        if self._heartbeats.mark_ended(address):
            self._notify()

    def leave(self) -> None:
        """This scheduler drains: the others may take its shards as it gives them up."""
        self._wake.set()
        if self._heartbeats.leave():
            self._notify()

    def set_map(self, following: ClusterMap, written_ms: int) -> None:
        """Use another map, unless it is older. `written_ms`: when Redis got it, by its clock."""
        if self._maps.use(following):
            self._map_since, self._map_since_ms = self._clock(), written_ms
            self._notify()

    async def read_again(self) -> None:
        """Wait for a reading that begins after this call, at once."""
        num_begun, is_heard = self._num_begun, asyncio.Event()
        self.listen(is_heard.set)
        self._wake.set()
        try:
            while self._last_read <= num_begun:
                is_heard.clear()
                await is_heard.wait()
        finally:
            self.stop_listening(is_heard.set)

    async def run(self) -> None:
        """Send heartbeats until cancelled; then leave."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                # Before the heartbeat: what is due while it is sent is not in it.
                self._wake.clear()
                try:
                    self._take(await self._beat(self.address))
                    self.why_silent = None
                    self._reasons.clear()
                except StoreError as error:
                    self.why_silent = str(error)
                    if self.why_silent not in self._reasons:
                        # Logged once, not at every attempt: reasons may alternate.
                        self._reasons.add(self.why_silent)
                        log.warning("no heartbeat", reason=self.why_silent)
                    # Loads have grown older.
                    self._notify()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_tick(HEARTBEAT_S, loop.time())):
                        await self._wake.wait()
        finally:
            with contextlib.suppress(StoreError):
                await self._beat("")

    async def _beat(self, address: str) -> ClusterReading:
        loads = {shard: self._codec.pack(shard, load) for shard, load in self._own_loads().items()}
        self._num_begun += 1
        number = self._num_begun
        reading = await self._store.beat(self.id, address, round(self._expiry_s * 1000), loads)
        self._last_read = number
        return reading

    def _own_loads(self) -> dict[int, ShardLoad]:
        loads = ((shard, read()) for shard, read in self._read_loads.items())
        return {shard: load for shard, load in loads if load is not None}

    def _take(self, reading: ClusterReading) -> None:
        self._heartbeats.take(reading)
        self._loads = {
            shard: self._codec.parse(shard, timed.value)
            for shard, timed in reading.loads.items()
            if not self._heartbeats.has_expired(timed.written_ms)
        } | self._own_loads()
        self._listed = []
        version = self.map.version
        self._maps.read(reading.packed_map, reading.loads)
        if self.map.version != version:
            self._map_since_ms = reading.now_ms
            if self.is_known.is_set():
                self._map_since = self._clock()
        if self._maps.problem is None:
            self.is_known.set()
        self._notify()

    def _notify(self) -> None:
        if self._owners_members is not self.members or self._owners_map is not self.map:
            self._owners_members, self._owners_map = self.members, self.map
            self._owners = assign_owners(self.map.num_shards, self.members, self.map.owners)
        for listener in list(self._listeners):
            listener()

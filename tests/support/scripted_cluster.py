"""What schedulers know of one another, without Redis, and a clock that tests move."""

from collections.abc import Mapping

from scheduler_svc.cluster.cluster_map import ClusterMap
from scheduler_svc.cluster.coordinator import Coordinator
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.store.cluster import ClusterReading, Timed
from scheduler_svc.store.errors import StoreUnavailable

EXPIRY_S = 3.0


class ScriptedCluster:
    """A store of heartbeats, as heartbeat.lua keeps them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.schedulers: dict[str, Timed] = {}
        self.loads: dict[int, Timed] = {}
        self.map: bytes | None = None

    @property
    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    def member(self, address: str) -> Membership:
        """A scheduler's view. Its own clock is Redis'."""
        return Membership(self, address, EXPIRY_S, clock=lambda: self.now_s)  # type: ignore[arg-type]

    async def beat(
        self, scheduler_id: str, address: str, expiry_ms: int, loads: Mapping[int, bytes]
    ) -> ClusterReading:
        self.schedulers[scheduler_id] = Timed(self.now_ms, address.encode())
        self.loads |= {shard: Timed(self.now_ms, load) for shard, load in loads.items()}
        self.schedulers = {
            name: timed
            for name, timed in self.schedulers.items()
            if abs(self.now_ms - timed.written_ms) <= expiry_ms
        }
        return ClusterReading(self.now_ms, self.schedulers, dict(self.loads), self.map)

    def lose_writes(self) -> None:
        self.schedulers, self.loads, self.map = {}, {}, None

    def set_map(self, cluster_map: ClusterMap) -> None:
        self.map = cluster_map.pack()


async def beat(*members: Membership) -> None:
    """A heartbeat of each member, in this order."""
    for member in members:
        member._take(await member._beat(member.address))


class Written:
    """The store and the names of workers, scripted."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        self.cluster = cluster
        self.num_writes = 0
        self.error: Exception | None = None
        # Whether calls are executed, and their replies are lost.
        self.is_silent = False
        self.all: frozenset[str] = frozenset()

    async def write_map(self, packed: bytes) -> int:
        if self.error is not None:
            raise self.error
        self.num_writes += 1
        self.cluster.map = packed
        if self.is_silent:
            raise StoreUnavailable("no reply")
        return self.cluster.now_ms

    @property
    def map(self) -> ClusterMap:
        assert self.cluster.map is not None
        return ClusterMap.parse(self.cluster.map)


def coordinator(leader: Membership, written: Written) -> Coordinator:
    return Coordinator(leader, written, written, lambda: written.cluster.now_s, reached)


async def reached(address: str) -> bool:
    """All but one are."""
    return address != "unreachable"

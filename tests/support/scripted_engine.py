"""A scripted engine for the operators' interface, made of plain values."""

import asyncio
from dataclasses import dataclass, field

from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.quotas import Quotas
from scheduler_svc.core.stats import EngineStats, LaneStats
from scheduler_svc.store.errors import StoreUnavailable

NULL, FREE, CACHED, HELD = range(4)


@dataclass(frozen=True)
class ScriptedWorker:
    incarnation: int
    num_blocks: int


@dataclass
class ScriptedPool:
    # As in operations.proto.
    kinds: bytes
    # Duration of a read.
    read_s: float = 0.0
    num_reads: int = 0
    is_away: bool = False

    async def block_map(self) -> bytes:
        self.num_reads += 1
        await asyncio.sleep(self.read_s)
        self.check()
        return self.kinds

    def check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("Redis: gone")


@dataclass
class ScriptedLane:
    worker: ScriptedWorker
    pool: ScriptedPool
    address: str = "unix:/run/worker.sock"
    draining: bool = False
    stats: LaneStats = field(default_factory=LaneStats)
    rows: list[int] = field(default_factory=list)
    assigned: list[int] = field(default_factory=list)
    num_swapped: int = 0

    @property
    def num_free_blocks(self) -> int:
        return self.pool.kinds.count(FREE) + self.pool.kinds.count(CACHED)

    async def reset_prefix_cache(self) -> int:
        self.pool.check()
        return self.pool.kinds.count(CACHED)


class ScriptedQueue(list[int]):
    """The numbers of tokens of the queued requests."""

    @property
    def num_tokens(self) -> int:
        return sum(self)

    def num_tokens_of(self, principal: str) -> int:
        """All are of the tenant t."""
        return self.num_tokens if principal == "t" else 0


@dataclass
class ScriptedEngine:
    lanes: dict[int, ScriptedLane] = field(default_factory=dict)
    refused_workers: dict[str, str] = field(default_factory=dict)
    waiting: ScriptedQueue = field(default_factory=ScriptedQueue)
    stats: EngineStats = field(default_factory=EngineStats)
    shares: FairShares = field(default_factory=FairShares)
    quotas: Quotas = field(default_factory=Quotas)
    # How often output was counted.
    num_counts: int = 0

    @property
    def num_sequences(self) -> int:
        lanes = self.lanes.values()
        on_lanes = sum(len(one.rows) + len(one.assigned) + one.num_swapped for one in lanes)
        return len(self.waiting) + on_lanes

    def count_output(self) -> None:
        self.num_counts += 1

    def add(self, incarnation: int, *kinds: int) -> ScriptedLane:
        """Add a lane whose pool has these blocks after the null block."""
        worker = ScriptedWorker(incarnation, num_blocks=1 + len(kinds))
        lane = self.lanes[incarnation] = ScriptedLane(worker, ScriptedPool(bytes([NULL, *kinds])))
        return lane

"""An engine as operators see it, made of plain values."""

import asyncio
from dataclasses import dataclass, field

from scheduler_svc.core.stats import EngineStats, LaneStats
from scheduler_svc.store.audit import PoolAudit
from scheduler_svc.store.errors import StoreUnavailable


@dataclass(frozen=True)
class ScriptedWorker:
    incarnation: int
    num_blocks: int


def audit(num_blocks: int, held: tuple[int, ...], hashed: tuple[int, ...]) -> PoolAudit:
    return PoolAudit(
        num_blocks=num_blocks,
        step=1,
        free_order=tuple(b for b in range(1, num_blocks) if b not in held),
        references=dict.fromkeys(held, 1),
        hashes={block: bytes([block]) for block in hashed},
        index={bytes([block]): (block,) for block in hashed},
        next_indices={},
    )


@dataclass
class ScriptedLane:
    worker: ScriptedWorker
    audited: PoolAudit
    address: str = "unix:/run/worker.sock"
    draining: bool = False
    stats: LaneStats = field(default_factory=LaneStats)
    rows: list[int] = field(default_factory=list)
    assigned: list[int] = field(default_factory=list)
    num_swapped: int = 0
    is_redis_away: bool = False
    # What a look at the pool takes.
    audit_s: float = 0.0
    num_audits: int = 0

    @property
    def num_free_blocks(self) -> int:
        return self.audited.num_free

    async def audit(self) -> PoolAudit:
        self.num_audits += 1
        await asyncio.sleep(self.audit_s)
        if self.is_redis_away:
            raise StoreUnavailable("Redis: gone")
        return self.audited

    async def reset_prefix_cache(self) -> int:
        if self.is_redis_away:
            raise StoreUnavailable("Redis: gone")
        return len(self.audited.hashes)


class ScriptedQueue(list[int]):
    """The numbers of tokens of the requests that wait."""

    @property
    def num_tokens(self) -> int:
        return sum(self)


@dataclass
class ScriptedEngine:
    lanes: dict[int, ScriptedLane] = field(default_factory=dict)
    waiting: ScriptedQueue = field(default_factory=ScriptedQueue)
    stats: EngineStats = field(default_factory=EngineStats)

    def add(self, incarnation: int, pool: PoolAudit) -> ScriptedLane:
        lane = ScriptedLane(ScriptedWorker(incarnation, pool.num_blocks), pool)
        self.lanes[incarnation] = lane
        return lane

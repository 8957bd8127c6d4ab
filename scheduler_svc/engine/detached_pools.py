"""Pools of lost workers, kept while their workers may return with warm caches."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store

KEEP_S = 60.0
# A new leader keeps even older pools for this long: their workers may be about to join.
REJOIN_S = 2.0


@dataclass(frozen=True, slots=True)
class DetachedPool:
    # The last known step.
    last_step: int
    # Address of its worker; None for a pool of an earlier term.
    address: str | None
    # When it lost its lane, of time.monotonic; None until Redis has been asked.
    detached_at: float | None = None


class DetachedPools:
    """Keeps pools without a lane for `KEEP_S`, and drops them when their workers are lost for good.

    Redis keeps the time at which a pool lost its lane, so that it counts on under the next leader.
    A pool's journal is compacted into the records before the pool is reopened or dropped.
    """

    def __init__(self, store: Store, record_writer: RecordWriter, steps: Mapping[int, int]) -> None:
        """`steps`: the pools of an earlier term, by incarnation, with their last known steps."""
        self._store = store
        self._record_writer = record_writer
        self._pools = {incarnation: DetachedPool(step, None) for incarnation, step in steps.items()}
        # Sequences with tokens in the journals of lost lanes.
        self._uncompacted: list[Sequence] = []
        # Incarnations whose workers have died.
        self._dead: set[int] = set()
        # Incarnations whose pools contradict themselves or their lanes.
        self._faulty: set[int] = set()

    @property
    def steps(self) -> dict[int, int]:
        """The last known step of each pool, by incarnation."""
        return {incarnation: pool.last_step for incarnation, pool in self._pools.items()}

    def add(self, pool: Pool, address: str, step: int, lost: list[Sequence]) -> None:
        """Add the pool of a lane that ended at `step`; `lost` have tokens in its journal."""
        self._pools[pool.incarnation] = DetachedPool(step, address)
        self._uncompacted += lost

    def distrust(self, pool: Pool) -> None:
        """Drop the pool before it is opened again: opening it does not mend it."""
        self._faulty.add(pool.incarnation)

    async def compact(self) -> None:
        """Compact the journals of lost lanes. Repeat it after StoreUnavailable."""
        if self._uncompacted:
            uncompacted = list(self._uncompacted)
            await self._record_writer.compact(uncompacted)
            del self._uncompacted[: len(uncompacted)]

    async def reopen(self, pool: Pool, address: str, last_finished_step: int) -> int:
        """Open a worker's pool; return the step to start above. Pools of other workers seen at the
        same address are marked to be dropped: those workers have died."""
        if pool.incarnation in self._faulty:
            # As in `drop_expired`.
            await self._record_writer.flush()
            await pool.drop()
            self._faulty.discard(pool.incarnation)
        # It is dropped, too, if Redis fails in between and the worker never returns.
        known = self._pools.setdefault(pool.incarnation, DetachedPool(0, address))
        first_step = await pool.open(last_finished_step, known.last_step)
        del self._pools[pool.incarnation]
        self._dead |= {
            incarnation for incarnation, other in self._pools.items() if other.address == address
        }
        return first_step

    async def drop_expired(self) -> None:
        """Drop pools whose workers have died or have been disconnected for `KEEP_S`."""
        with contextlib.suppress(StoreUnavailable):
            await self._find_ages()
            await self.compact()
            if expired := self._expired():
                # Their journals may be the only record of some endings.
                await self._record_writer.flush()
            for incarnation in expired:
                await self._store.pool(incarnation, num_blocks=0).drop()
                self._pools.pop(incarnation, None)
                self._dead.discard(incarnation)
                self._faulty.discard(incarnation)

    async def _find_ages(self) -> None:
        """Note in Redis that these pools have no lane, and ask since when."""
        for incarnation, pool in list(self._pools.items()):
            if pool.detached_at is None:
                age_s = await self._store.pool(incarnation, num_blocks=0).detach()
                detached_at = time.monotonic() - min(age_s, KEEP_S - REJOIN_S)
                self._pools[incarnation] = replace(pool, detached_at=detached_at)

    def _expired(self) -> set[int]:
        oldest = time.monotonic() - KEEP_S
        late = {
            incarnation
            for incarnation, pool in self._pools.items()
            if pool.detached_at is not None and pool.detached_at <= oldest
        }
        return late | self._dead

"""Pools without a lane: their workers may come back and find their caches as they left them."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.recorder import Recorder
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.store import Store

KEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class FormerPool:
    # The last step that is known of it.
    step: int
    # Where its worker was reached; None for one of a former leadership.
    address: str | None
    left_at: float  # of time.monotonic


class FormerPools:
    """Keeps them for a while, and drops them when their workers are gone for certain.

    What a pool has journaled is folded into the records before anything happens to the pool.
    """

    def __init__(self, store: Store, recorder: Recorder, steps: Mapping[int, int]) -> None:
        now = time.monotonic()
        self._store = store
        self._recorder = recorder
        self._pools = {
            incarnation: FormerPool(step, None, now) for incarnation, step in steps.items()
        }
        # Sequences that have tokens in the journals of lost lanes.
        self._unfolded: list[Sequence] = []
        self._doomed: set[int] = set()

    @property
    def steps(self) -> dict[int, int]:
        """The last step that is known of each, by incarnation."""
        return {incarnation: pool.step for incarnation, pool in self._pools.items()}

    def add(self, pool: Pool, address: str, step: int, lost: list[Sequence]) -> None:
        """A lane has ended at a step, with sequences that have tokens in its journal."""
        self._pools[pool.incarnation] = FormerPool(step, address, time.monotonic())
        self._unfolded += lost

    async def settle(self) -> None:
        """Folds what lost lanes have journaled. StoreUnavailable: to be called again."""
        if self._unfolded:
            unfolded = list(self._unfolded)
            await self._recorder.fold(unfolded)
            del self._unfolded[: len(unfolded)]

    async def reopen(self, pool: Pool, address: str, last_finished_step: int) -> int:
        """Opens a worker's pool; the step to start above. Another worker's that was at the same
        address is dropped: that one has died."""
        former = self._pools.get(pool.incarnation)
        first_step = await pool.open(last_finished_step, former.step if former else 0)
        self._pools.pop(pool.incarnation, None)
        self._doomed |= {
            incarnation for incarnation, other in self._pools.items() if other.address == address
        }
        return first_step

    async def tidy(self) -> None:
        """Drops those whose workers have died or have not come back for long."""
        oldest = time.monotonic() - KEEP_S
        late = {incarnation for incarnation, pool in self._pools.items() if pool.left_at < oldest}
        with contextlib.suppress(StoreUnavailable):
            await self.settle()
            if gone := late | self._doomed:
                # Their journals may be all that tells of ends.
                await self._recorder.flush()
            for incarnation in gone:
                await self._store.pool(incarnation, num_blocks=0).drop()
                self._pools.pop(incarnation, None)
                self._doomed.discard(incarnation)

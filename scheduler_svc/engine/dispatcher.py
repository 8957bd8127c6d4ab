"""Moves sequences from the head of the queue to the lane that can serve them soonest."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from scheduler_svc.core.block_fit import blocks_for
from scheduler_svc.core.placement import Demand, LaneBudget, Placement, choose_lane
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.lane import Lane
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import PrefixMatch

# Sequences at the head of the queue that are matched against the caches in one call.
MATCH_BATCH = 64

MatchPools = Callable[[list[Pool], list[list[bytes]]], Awaitable[list[list[PrefixMatch]]]]


class Dispatcher:
    """Assigns queued sequences to lanes with room, strictly in queue order."""

    def __init__(
        self,
        waiting: WaitingQueue,
        lanes: Mapping[int, Lane],
        prepare: Callable[[Sequence], bool],
        charge_output: Callable[[], None],
        match_pools: MatchPools,
        placement: Placement,
    ) -> None:
        """`prepare` allows cache lookups for a sequence; False if it is finished instead.
        `charge_output` charges principals for the output so far. `match_pools` waits while Redis is
        unavailable."""
        self._waiting = waiting
        self._lanes = lanes
        self._prepare = prepare
        self._charge_output = charge_output
        self._match_pools = match_pools
        self._placement = placement
        self._wake = asyncio.Event()
        self._awaited: frozenset[int] = frozenset()
        self._next_index = 0

    def wait_for_lanes(self, incarnations: Iterable[int], within_s: float) -> None:
        """Assign nothing until these workers have lanes, for at most `within_s`: other workers
        would recompute what these have cached."""
        self._awaited = frozenset(incarnations)
        asyncio.get_running_loop().call_later(within_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self._awaited = frozenset()
        self.wake()

    def wake(self) -> None:
        """Try to assign again: a sequence was queued, or a lane may have room."""
        if self._waiting:
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while await self._assign():
                pass

    async def _assign(self) -> bool:
        """Assign sequences from the head of the queue; True if more might be assigned."""
        lanes = self._open_lanes()
        if not lanes or self._awaited - self._lanes.keys():
            return False
        if self._waiting.is_contended:
            self._charge_output()
        batch = [other for other in self._waiting.first(MATCH_BATCH) if self._prepare(other)]
        if not batch:
            return bool(self._waiting)
        matches = await self._match(lanes, batch)
        if any(self._lanes.get(lane.worker.incarnation) is not lane for lane in lanes):
            # A lane was removed during the match; it would never run what is assigned to it.
            return True
        budgets = [lane.assignments.budget() for lane in lanes]
        for sequence, row in zip(batch, matches, strict=True):
            # The queue may have changed during the match.
            if self._waiting.head is not sequence:
                return True
            chosen = self._choose(lanes, budgets, sequence, row)
            if chosen is None:
                return False
            self._waiting.dispatch(sequence)
            lanes[chosen].assign(sequence, row[chosen])
        return bool(self._waiting)

    def _open_lanes(self) -> list[Lane]:
        return [lane for lane in self._lanes.values() if lane.assignments.is_open]

    async def _match(
        self, lanes: list[Lane], batch: list[Sequence]
    ) -> list[list[PrefixMatch | None]]:
        """Per sequence, its cached prefix on each lane."""
        if len(lanes) == 1 or self._placement is Placement.ROUND_ROBIN:
            # The choice does not depend on caches; the lane queries its own cache at admission.
            return [[None] * len(lanes) for _ in batch]
        queries = [lanes[0].assignments.matchable(sequence) for sequence in batch]
        columns = await self._match_pools([lane.pool for lane in lanes], queries)
        return [list(row) for row in zip(*columns, strict=True)]

    def _choose(
        self,
        lanes: list[Lane],
        budgets: list[LaneBudget],
        sequence: Sequence,
        matches: list[PrefixMatch | None],
    ) -> int | None:
        demands = [
            _demand(sequence, lane, match) for lane, match in zip(lanes, matches, strict=True)
        ]
        if self._placement is Placement.ROUND_ROBIN:
            chosen = self._next_round_robin(budgets, demands)
        else:
            chosen = choose_lane(budgets, demands)
        if chosen is not None:
            budgets[chosen].take(demands[chosen])
        return chosen

    def _next_round_robin(self, budgets: list[LaneBudget], demands: list[Demand]) -> int | None:
        for offset in range(len(budgets)):
            index = (self._next_index + offset) % len(budgets)
            if budgets[index].has_room(demands[index]):
                self._next_index = index + 1
                return index
        return None


def _demand(sequence: Sequence, lane: Lane, match: PrefixMatch | None) -> Demand:
    limits = lane.limits
    num_tokens = len(sequence.token_ids)
    num_hits, num_free_hits = (match.num_hits, match.num_free_hits) if match else (0, 0)
    num_blocks = blocks_for(num_tokens, limits.block_size)
    return Demand(
        num_rows=sequence.num_wanted_rows,
        # Without a match the lane finds the hits at admission.
        num_new_blocks=num_blocks - num_hits + num_free_hits if match else 1,
        num_uncached_tokens=num_tokens - num_hits * limits.block_size,
        watermark=0 if sequence.has_precedence else limits.watermark,
        is_divisible=not sequence.is_beam,
    )

"""From the queue's head to the lane that will serve it soonest."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

import structlog

from scheduler_svc.core.placement import Demand, LaneBudget, Placement, choose_lane
from scheduler_svc.core.policy import blocks_for
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lanes.lane import Lane
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import PrefixMatch

log = structlog.get_logger()

# Sequences at the head of the queue that are matched with the caches in one go.
BATCH = 64
RETRY_S = 0.2

MatchPools = Callable[[list[Pool], list[list[bytes]]], Awaitable[list[list[PrefixMatch]]]]


class Dispatcher:
    """Moves sequences to lanes as they get room; nobody passes the head."""

    def __init__(
        self,
        waiting: WaitingQueue,
        lanes: Mapping[int, Lane],
        prepare: Callable[[Sequence], bool],
        match_pools: MatchPools,
        placement: Placement,
    ) -> None:
        """`prepare` readies a sequence for its first look at a cache; False: it has left."""
        self._waiting = waiting
        self._lanes = lanes
        self._prepare = prepare
        self._match_pools = match_pools
        self._placement = placement
        self._wanted = asyncio.Event()
        self._awaited: frozenset[int] = frozenset()
        self._turn = 0

    def await_lanes(self, incarnations: Iterable[int], within_s: float) -> None:
        """Places nobody until these workers have lanes, or for so long: what is in their caches the
        others would compute again."""
        self._awaited = frozenset(incarnations)
        asyncio.get_running_loop().call_later(within_s, self._await_no_more)

    def _await_no_more(self) -> None:
        self._awaited = frozenset()
        self.stir()

    def stir(self) -> None:
        """Somebody waits, or a lane may take more."""
        if self._waiting:
            self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while await self._place():
                    pass
            except StoreUnavailable as error:
                log.warning("placement waits for Redis", error=str(error))
                await asyncio.sleep(RETRY_S)
                self._wanted.set()

    async def _place(self) -> bool:
        """Places sequences from the head of the queue; True if there may be more to place."""
        lanes = self._open_lanes()
        if not lanes or self._awaited - self._lanes.keys():
            return False
        batch = [other for other in self._waiting.first(BATCH) if self._prepare(other)]
        if not batch:
            return bool(self._waiting)
        matches = await self._match(lanes, batch)
        if any(self._lanes.get(lane.worker.incarnation) is not lane for lane in lanes):
            # A lane has gone meanwhile: nobody would step what it is given.
            return True
        budgets = [lane.budget() for lane in lanes]
        for sequence, row in zip(batch, matches, strict=True):
            # The queue may have changed while the caches were asked.
            if self._waiting.head is not sequence:
                return True
            chosen = self._choose(lanes, budgets, sequence, row)
            if chosen is None:
                return False
            self._waiting.remove(sequence)
            lanes[chosen].assign(sequence, row[chosen])
        return bool(self._waiting)

    def _open_lanes(self) -> list[Lane]:
        return [lane for lane in self._lanes.values() if lane.is_open]

    async def _match(
        self, lanes: list[Lane], batch: list[Sequence]
    ) -> list[list[PrefixMatch | None]]:
        """Per sequence, what each lane's cache holds of it."""
        if len(lanes) == 1 or self._placement is Placement.ROUND_ROBIN:
            # The choice is made; the lane asks its cache when it considers the sequence.
            return [[None] * len(lanes) for _ in batch]
        queries = [lanes[0].matchable(sequence) for sequence in batch]
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
            chosen = self._next_in_turn(budgets, demands)
        else:
            chosen = choose_lane(budgets, demands)
        if chosen is not None:
            budgets[chosen].take(demands[chosen])
        return chosen

    def _next_in_turn(self, budgets: list[LaneBudget], demands: list[Demand]) -> int | None:
        for offset in range(len(budgets)):
            index = (self._turn + offset) % len(budgets)
            if budgets[index].has_room(demands[index]):
                self._turn = index + 1
                return index
        return None


def _demand(sequence: Sequence, lane: Lane, match: PrefixMatch | None) -> Demand:
    limits = lane.limits
    num_tokens = len(sequence.token_ids)
    num_hits, num_free_hits = (match.num_hits, match.num_free_hits) if match else (0, 0)
    num_blocks = blocks_for(num_tokens, limits.block_size)
    return Demand(
        num_rows=sequence.num_wanted_rows,
        # Unknown hits are for the lane to find out.
        num_new_blocks=num_blocks - num_hits + num_free_hits if match else 1,
        num_uncached_tokens=num_tokens - num_hits * limits.block_size,
        watermark=0 if sequence.was_preempted else limits.watermark,
    )

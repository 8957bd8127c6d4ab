"""When a lane compacts its journal."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.journal_compaction import COMPACT_EVERY_STEPS, JournalCompaction

_FIRST_STEP = 1000


class Compacting:
    """A lane's journal, of which every compaction ends before the next step."""

    def __init__(self, incarnation: int) -> None:
        # As PoolClient has them.
        self.pool = SimpleNamespace(incarnation=incarnation, retry=self._call)
        self.last_step = _FIRST_STEP
        self.compacted: list[list[Sequence]] = []
        self.trimmed: list[int] = []
        self.compaction = JournalCompaction(self, self._compact)  # type: ignore[arg-type]

    async def step(self, step: int) -> None:
        self.compaction.start_if_due(step, [])
        await asyncio.sleep(0)

    async def trim_journal(self, step: int) -> None:
        self.trimmed.append(step)

    async def _compact(self, sequences: list[Sequence]) -> None:
        self.compacted.append(sequences)

    async def _call(self, call: Callable[[], Awaitable[None]]) -> None:
        await call()


@pytest.mark.parametrize("incarnation", [0, 1, COMPACT_EVERY_STEPS - 1, 2**64 - 5])
async def test_it_is_compacted_at_regular_intervals(incarnation: int) -> None:
    lane = Compacting(incarnation)
    for step in range(_FIRST_STEP + 1, _FIRST_STEP + 3 * COMPACT_EVERY_STEPS + 1):
        await lane.step(step)
    first = lane.trimmed[0]
    assert _FIRST_STEP < first <= _FIRST_STEP + COMPACT_EVERY_STEPS
    assert lane.trimmed == [first, first + COMPACT_EVERY_STEPS, first + 2 * COMPACT_EVERY_STEPS]


async def test_lanes_that_step_together_compact_at_different_steps() -> None:
    lanes = [Compacting(incarnation) for incarnation in range(COMPACT_EVERY_STEPS)]
    for step in range(_FIRST_STEP + 1, _FIRST_STEP + COMPACT_EVERY_STEPS + 1):
        for lane in lanes:
            await lane.step(step)
    assert len({lane.trimmed[0] for lane in lanes}) == COMPACT_EVERY_STEPS


async def test_those_that_left_the_lane_are_compacted_once() -> None:
    lane = Compacting(0)
    left = [object()]
    lane.compaction.uncompacted += left  # type: ignore[arg-type]
    await lane.step(_FIRST_STEP + COMPACT_EVERY_STEPS)
    await lane.step(_FIRST_STEP + 2 * COMPACT_EVERY_STEPS)
    assert lane.compacted == [left, []]


async def test_the_error_of_a_compaction_is_raised_at_the_next_step() -> None:
    lane = Compacting(0)

    async def fail(call: Callable[[], Awaitable[None]]) -> None:
        raise RuntimeError("lost")

    lane.pool.retry = fail
    await lane.step(_FIRST_STEP + COMPACT_EVERY_STEPS)
    assert lane.compaction.is_due(_FIRST_STEP + COMPACT_EVERY_STEPS + 1)
    with pytest.raises(RuntimeError, match="lost"):
        await lane.step(_FIRST_STEP + COMPACT_EVERY_STEPS + 1)

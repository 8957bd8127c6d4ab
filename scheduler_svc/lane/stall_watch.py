"""Ends a lane that has sequences and runs none of them.

There is always something to run or to wait for; a lane without either has inconsistent state, by a
defect of this program. Its sequences would wait for ever. So the lane is lost, with its state in
the log: they run again, on this worker or another one, and give the same tokens.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.lane.worker_stream import LaneLost

log = structlog.get_logger()

# Much longer than a batch window; a lane that waits for Redis or the lease does not count as idle.
STALL_S: Final = 5.0
# Sequences of each kind in the log.
_MAX_LOGGED: Final = 8


class StallWatch:
    """The time for which one lane has waited, since its last step, with sequences and without a
    plan in flight. What it waits within a step, for Redis or the lease, does not count."""

    def __init__(self, table: SequenceTable, wake: Callable[[], None]) -> None:
        """`wake` ends a wait."""
        self._table = table
        self._wake = wake
        self._waited_s = 0.0

    @contextmanager
    def waiting(self, num_in_flight: int) -> Iterator[None]:
        """The context of a wait, in which the lane has found nothing to do. LaneLost, before it
        begins, if there were such waits for too long."""
        if num_in_flight or self._table.is_empty:
            self.stepped()
            yield
            return
        if self._waited_s >= STALL_S:
            log.error("lane stalled", **self._state())
            raise LaneLost(f"it had sequences and ran none of them for {STALL_S:g} s")
        began = time.monotonic()
        timer = asyncio.get_running_loop().call_later(STALL_S - self._waited_s, self._wake)
        try:
            yield
        finally:
            timer.cancel()
            self._waited_s += time.monotonic() - began

    def stepped(self) -> None:
        """The lane has made a step."""
        self._waited_s = 0.0

    def _state(self) -> dict[str, Any]:
        table = self._table
        return {
            "completed_step": table.completed_step,
            "rows": _described(table.rows),
            "assigned": _described(table.assigned),
            "swapped": _described(one for group in table.swapped for one in group.sequences),
            "awaiting_results": _described(table.awaiting_results),
        }


def _described(sequences: Iterable[Sequence]) -> list[str]:
    """Each with its request and choice, its tokens, those that are computed, and its last step."""
    return [
        f"{one.group.record.key.request_id}/{one.choice}: {one.num_tokens} tokens, "
        f"{one.num_computed_tokens} computed, step {one.last_step}"
        for one, _ in zip(sequences, range(_MAX_LOGGED), strict=False)
    ]

"""Ends a lane that has sequences and runs none of them.

There is always something to run or to wait for; a lane without either has inconsistent state, by a
defect of this program. Its sequences would wait for ever. So the lane is lost, with its state in
the log: they run again, on this worker or another one, and give the same tokens.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
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
    """The time for which one lane has had sequences, and neither a step nor a plan in flight."""

    def __init__(self, table: SequenceTable, wake: Callable[[], None]) -> None:
        """`wake` lets the lane look for work again, and then `check`."""
        self._table = table
        self._wake = wake
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def check(self, num_in_flight: int) -> None:
        """To be called when the lane has found nothing to do. LaneLost if it has sequences and had
        nothing in flight for too long."""
        if num_in_flight or self._table.is_empty:
            self.cancel()
        elif self._since is None:
            self._since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(STALL_S, self._wake)
        elif time.monotonic() >= self._since + STALL_S:
            log.error("lane stalled", **self._state())
            raise LaneLost(f"it had sequences and ran none of them for {STALL_S:g} s")

    def cancel(self) -> None:
        """To be called after a step, too. The next check begins anew."""
        self._since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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

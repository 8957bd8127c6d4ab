"""Rows that cannot sample yet, because something of theirs is being prepared in a thread."""

from collections.abc import Callable
from typing import Final

import numpy as np

from worker_svc.plan.inputs import Ints
from worker_svc.plan.jumps import lookahead_rows
from worker_svc.plan.plans import Plan

# A step of waiting rows alone waits so long: they would be computed again and again.
_MAX_WAIT_S: Final = 0.02

# Returns those of the rows that have to wait, after waiting for one of them for so many seconds.
UnreadyRows = Callable[[Ints, float], list[int]]


def rows_to_hold(plan: Plan, sampling: Ints, unready: UnreadyRows) -> list[int]:
    """Those of the sampling rows that have to wait, and can: the scheduler expects a token of each
    row without look-ahead. The other rows do not wait for them."""
    waiting = unready(sampling, 0)
    if not waiting:
        return []
    lookahead = lookahead_rows(plan)
    held = [row for row in waiting if row in lookahead]
    if len(held) == len(plan.rows):
        held = unready(np.array(held), _MAX_WAIT_S)
    return held

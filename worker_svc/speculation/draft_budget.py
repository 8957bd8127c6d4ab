"""Which rows get drafts in a step, and how many."""

from typing import Final, Protocol

import numpy as np

from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Plan
from worker_svc.plan.tables import RowTables

# Tokens of a step, with its drafts. Up to so many, a CPU spends most of a step reading weights.
MAX_STEP_TOKENS: Final = 12


class Lengths(Protocol):
    """How many drafts a row is worth, by what became of its earlier ones."""

    def admit(self, row: int) -> None:
        """Forget what was known of the row: it has another sequence."""
        ...

    def next(self, rows: Ints) -> Ints:
        """The most drafts of each of these rows in a step."""
        ...

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        """What became of the drafts of rows that had any."""
        ...


class DraftBudget:
    """Drafts belong to rows with look-ahead that have one token left to compute, as far as their
    blocks have room. A step with drafts has MAX_STEP_TOKENS tokens at most, and its rows share
    them equally: full steps have none.
    """

    def __init__(self, lengths: Lengths, tables: RowTables) -> None:
        self._lengths = lengths
        self._tables = tables

    def most(self, plan: Plan, rows: Ints, counts: Ints) -> Ints | None:
        """The most drafts of each row; None if no row may have any. To be called once per plan, or
        round of a plan, after it was applied to the tables."""
        for admission in plan.admissions:
            self._lengths.admit(admission.row)
        left = min(MAX_STEP_TOKENS, self._tables.max_num_batched_tokens) - int(counts.sum())
        if left <= 0 or not plan.num_lookahead_tokens.any():
            return None
        room = self._tables.draft_room(plan, rows, counts)
        places = room.nonzero()[0]
        if not len(places):
            return None
        wanted = np.minimum(self._lengths.next(rows[places]), left // len(places))
        room[places] = np.minimum(wanted, room[places])
        return room if room.any() else None

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        """What became of the drafts of the rows that sampled."""
        has_drafts = num_drafts > 0
        if has_drafts.any():
            self._lengths.observe(
                rows[has_drafts], num_drafts[has_drafts], num_accepted[has_drafts]
            )

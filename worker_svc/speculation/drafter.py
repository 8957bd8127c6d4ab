"""The interface between a step and what proposes tokens."""

from typing import Protocol

from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Plan


class Drafter(Protocol):
    """Proposes tokens that rows compute beside their last ones.

    Drafts change no token of the output, whatever they are, so nothing of them needs to be the same
    on another worker or after a recovery.
    """

    def begin(self, plan: Plan) -> None:
        """Called before a plan, or round of a plan, is applied to the tables and moves blocks: the
        blocks of the rows that it releases may be read by others from now on."""
        ...

    def draft(self, plan: Plan, rows: Ints, counts: Ints) -> Ints | None:
        """Write drafts into the token table, behind the tokens of rows; return the number of each
        row, at most its `RowTables.draft_room`, or None if no row has any. `rows` are those that
        run, with `counts` tokens each. Called once per plan, or round of a plan, after it was
        applied to the tables."""
        ...

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        """What became of the drafts of the rows that sampled in this step."""
        ...

    def clear(self) -> None:
        """Called before all rows are released; blocks keep their contents."""
        ...

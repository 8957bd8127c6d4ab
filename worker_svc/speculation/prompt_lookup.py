"""Speculation by prompt lookup: drafts are what followed a row's last tokens before."""

from typing import Final

import numpy as np
import torch

from kernels.dispatch import Implementation
from kernels.prompt_lookup import prompt_lookup
from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Plan
from worker_svc.plan.tables import RowTables
from worker_svc.speculation.draft_lengths import DraftLengths

# Tokens of a step, with its drafts. Up to so many, a CPU spends most of a step reading weights.
MAX_STEP_TOKENS: Final = 12


class PromptLookup:
    """A drafter without a model.

    Drafts belong to rows with look-ahead that have one token left to compute, as far as their
    blocks have room. A step with drafts has MAX_STEP_TOKENS tokens at most, and its rows share
    them equally: full steps have none.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        tables: RowTables,
        implementation: Implementation | None = None,
    ) -> None:
        """`num_speculative_tokens` is the most drafts of a row in a step."""
        self._tables = tables
        self._token_table = torch.from_numpy(tables.token_table)
        self._implementation = implementation
        self._lengths = DraftLengths(num_speculative_tokens, tables.max_num_seqs)

    def draft(self, plan: Plan, rows: Ints, counts: Ints) -> Ints | None:
        for admission in plan.admissions:
            self._lengths.admit(admission.row)
        most = self._most(plan, rows, counts)
        if most is None:
            return None
        places = most.nonzero()[0]
        drafted = rows[places]
        arrays = (drafted, self._tables.num_tokens[drafted], most[places])
        found = prompt_lookup(
            self._token_table,
            *map(torch.from_numpy, arrays),
            implementation=self._implementation,
        )
        most[places] = found.numpy()
        return most if most.any() else None

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        has_drafts = num_drafts > 0
        if has_drafts.any():
            self._lengths.observe(
                rows[has_drafts], num_drafts[has_drafts], num_accepted[has_drafts]
            )

    def _most(self, plan: Plan, rows: Ints, counts: Ints) -> Ints | None:
        """The most drafts of each row; None if no row may have any."""
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

"""Speculation by prompt lookup: drafts are what followed a row's last tokens before."""

import torch

from kernels.dispatch import Implementation
from kernels.prompt_lookup import prompt_lookup
from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Plan
from worker_svc.plan.tables import RowTables
from worker_svc.speculation.draft_budget import DraftBudget
from worker_svc.speculation.draft_lengths import DraftLengths


class PromptLookup:
    """A drafter without a model."""

    def __init__(
        self,
        num_speculative_tokens: int,
        tables: RowTables,
        implementation: Implementation,
    ) -> None:
        """`num_speculative_tokens` is the most drafts of a row in a step."""
        self._tables = tables
        self._token_table = torch.from_numpy(tables.token_table)
        self._implementation = implementation
        lengths = DraftLengths(num_speculative_tokens, tables.max_num_seqs)
        self._budget = DraftBudget(lengths, tables)

    def begin(self, plan: Plan) -> None:
        """It has no state of rows."""

    def draft(self, plan: Plan, rows: Ints, counts: Ints) -> Ints | None:
        most = self._budget.most(plan, rows, counts)
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
        self._budget.observe(rows, num_drafts, num_accepted)

    def clear(self) -> None:
        """It has no state of rows."""

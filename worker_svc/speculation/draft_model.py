"""Speculation by a draft model: a smaller model with the same vocabulary."""

import numpy as np
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.sampling import sample
from worker_svc.plan.inputs import Ints
from worker_svc.plan.plans import Plan
from worker_svc.plan.tables import RowTables
from worker_svc.runner.sampling_params import SamplingParams
from worker_svc.speculation.draft_budget import DraftBudget
from worker_svc.speculation.draft_passes import DraftPasses
from worker_svc.speculation.priced_lengths import DraftPrice, PricedLengths


class DraftModel:
    """Drafts are what the draft model would write, with the parameters, the seeds and the positions
    of the rows: noise that makes the target choose an unlikely token makes the draft model choose
    it, too. Logits processors do not change its logits.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        price: DraftPrice,
        passes: DraftPasses,
        tables: RowTables,
        params: SamplingParams,
        implementation: Implementation,
    ) -> None:
        """`implementation` is that of the sampler."""
        self._passes = passes
        self._tables = tables
        self._params = params
        self._implementation = implementation
        self._lengths = PricedLengths(num_speculative_tokens, price, tables.max_num_seqs)
        self._budget = DraftBudget(self._lengths, tables)

    def begin(self, plan: Plan) -> None:
        """Compute what is pending where the plan hands blocks on, or where much is pending."""
        shares = any(admission.num_computed_tokens for admission in plan.admissions)
        hands_on = len(plan.released_rows) or shares or plan.moves_blocks
        if hands_on or self._passes.num_pending() >= self._tables.max_num_batched_tokens:
            self._passes.catch_up()

    def draft(self, plan: Plan, rows: Ints, counts: Ints) -> Ints | None:
        if plan.admissions:
            self._params.rows_have_changed()
        for admission in plan.admissions:
            self._passes.admit(admission.row, admission.num_computed_tokens)
        self._lengths.begin_step(len(rows), is_one_of_rounds=plan.is_one_of_rounds)
        most = self._budget.most(plan, rows, counts)
        if most is None:
            return None
        places = most.nonzero()[0]
        logits = self._passes.first_logits(rows[places])
        self._write(logits, rows[places], 0)
        for depth in range(1, int(most.max())):
            places = places[most[places] > depth]
            logits = self._passes.next_logits(rows[places])
            self._write(logits, rows[places], depth)
        return most

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        self._budget.observe(rows, num_drafts, num_accepted)

    def clear(self) -> None:
        self._passes.catch_up()

    def _write(self, logits: Tensor, rows: Ints, depth: int) -> None:
        """Draft number `depth` of each row, by its logits."""
        positions = self._tables.num_tokens[rows] + depth
        params = self._params.of(rows, positions)
        token_ids = sample(logits, params, implementation=self._implementation).numpy()
        # Logits that allow no token give a wrong draft.
        self._tables.token_table[rows, positions] = np.maximum(token_ids, 0)

"""A simulated worker whose rows fail, wait or have other log-probabilities, by their seeds."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from worker_svc.plan.inputs import Ints
from worker_svc.plan.jumps import lookahead_rows
from worker_svc.plan.plans import Plan
from worker_svc.sim.recorded_tokens import RecordedStep
from worker_svc.sim.runner import SimModel, SimRunner
from worker_svc.sim.sampling import Words, mix


def seeds_after(seeds: Words, token_ids: NDArray[np.int32]) -> Words:
    """The seeds of log-probabilities that depend on the last token."""
    return mix(seeds + token_ids.astype(np.uint64) + np.uint64(1))


class FaultySimRunner(SimRunner):
    """Rows whose seed is in `failing_seeds` fail when they sample."""

    def __init__(
        self, model: SimModel, *, num_holds: int = 0, token_logprobs: bool = False
    ) -> None:
        """Rows with look-ahead do not sample in the first `num_holds` steps of each seed.
        `token_logprobs`: log-probabilities depend on the last token, too."""
        super().__init__(model)
        self.failing_seeds: set[int] = set()
        self._num_holds = num_holds
        self._token_logprobs = token_logprobs
        self._held: Counter[int] = Counter()  # by seed

    def _held_rows(self, plan: Plan, rows: Ints, recorded: RecordedStep | None) -> list[int]:
        lookahead = lookahead_rows(plan)
        seeds = {row: int(self._tables.seeds[row]) for row in rows.tolist() if row in lookahead}
        held = [row for row, seed in seeds.items() if self._held[seed] < self._num_holds]
        self._held.update(seeds[row] for row in held)
        return held

    def _failing_rows(self, rows: Ints, recorded: RecordedStep | None) -> list[int]:
        return [row for row in rows.tolist() if int(self._tables.seeds[row]) in self.failing_seeds]

    def _logprob_seeds(self, rows: Ints) -> Words:
        seeds = super()._logprob_seeds(rows)
        if not self._token_logprobs:
            return seeds
        last = self._tables.num_tokens[rows] - 1
        return seeds_after(seeds, self._tables.token_table[rows, last])

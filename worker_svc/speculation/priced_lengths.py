"""How many drafts each row gets of a drafter that takes time for each of them."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from worker_svc.plan.inputs import Ints

# What each step leaves of the counts of earlier ones.
_DECAY: Final = 0.875
# Drafts of a new row that count as tested before its first one, and half of them as right.
_FIRST_TESTED: Final = 2.0
# Rows that drafts do not pay for have one in every `_PAUSE`th step only.
_PAUSE: Final = 32
# Times as bytes of weights that are read meanwhile, some 20 GB/s: what a pass takes beside reading
# weights, and what a plan takes in all services. Significant for small models only.
_PASS_BYTES: Final = 3e6
_PLAN_BYTES: Final = 20e6
# Of computing and sampling one draft: its share of the target's weights, and the call's time.
_VERIFYING_SHARE: Final = 0.05
_VERIFYING_BYTES: Final = 2e6


@dataclass(frozen=True)
class DraftPrice:
    """What one draft costs."""

    of_plan: float  # in plans of one round
    of_round: float  # in rounds of a plan of several

    @classmethod
    def of(cls, draft_bytes: float, target_bytes: float) -> "DraftPrice":
        """By the bytes of the weights of both models."""
        verifying = _VERIFYING_SHARE * target_bytes + _VERIFYING_BYTES
        of_draft = draft_bytes + _PASS_BYTES + verifying
        of_round = target_bytes + _PASS_BYTES
        return cls(of_draft / (of_round + _PLAN_BYTES), of_draft / of_round)


class PricedLengths:
    """A row's acceptance p is the share of its tested drafts that were right; tested are those up
    to the first wrong one, and later ones count more.

    With k drafts a step gives 1 + p + p² + … + pᵏ tokens and takes 1 + k * price times as long. A
    row gets the k with the most tokens per time. Where that is 0, it gets one draft in every 32nd
    step. All of it depends on numbers of steps and tokens, never on the clock.
    """

    def __init__(self, most: int, price: DraftPrice, max_num_seqs: int) -> None:
        self._tested = np.full(max_num_seqs, _FIRST_TESTED)
        self._right = np.full(max_num_seqs, _FIRST_TESTED / 2)
        self._pauses = np.zeros(max_num_seqs, np.int64)  # steps until a row has drafts again
        self._exponents = np.arange(most + 1)
        self._times_of_plan = 1 + self._exponents * price.of_plan
        self._times_of_round = 1 + self._exponents * price.of_round
        self._times: NDArray[np.floating[Any]] = self._times_of_plan

    def begin_step(self, *, is_one_of_rounds: bool) -> None:
        """Whether the plan of the next step has several rounds."""
        self._times = self._times_of_round if is_one_of_rounds else self._times_of_plan

    def admit(self, row: int) -> None:
        """Forget what was known of the row: it has another sequence."""
        self._tested[row], self._right[row] = _FIRST_TESTED, _FIRST_TESTED / 2
        self._pauses[row] = 0

    def next(self, rows: Ints) -> Ints:
        """The most drafts of each of these rows in a step."""
        counts = self._best(rows)
        self._pauses[rows] -= 1
        counts[counts == 0] = 1
        counts[self._pauses[rows] > 0] = 0
        return counts

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        """What became of the drafts of rows that had any."""
        tested = np.minimum(num_accepted + 1, num_drafts)
        self._tested[rows] = self._tested[rows] * _DECAY + tested
        self._right[rows] = self._right[rows] * _DECAY + num_accepted
        self._pauses[rows] = np.where(self._best(rows) == 0, _PAUSE, 0)

    def _best(self, rows: Ints) -> Ints:
        """The number of drafts with the most tokens per time."""
        acceptance = self._right[rows] / self._tested[rows]
        tokens = (acceptance[:, None] ** self._exponents).cumsum(axis=1)
        best: Ints = (tokens / self._times).argmax(axis=1)
        return best

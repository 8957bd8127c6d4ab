"""How many drafts each row gets of a drafter that takes time for each of them."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from worker_svc.plan.inputs import Ints

# What each step leaves of the counts of earlier ones.
_DECAY: Final = 0.875
# Drafts of a new row that count as tested before its first one, and half of them as right.
_FIRST_TESTED: Final = 2.0
# Rows that drafts do not pay for have one in every `_PAUSE`th step only, all in the same.
_PAUSE: Final = 32
# Times as bytes of weights that are read meanwhile, some 20 GB/s: what a pass takes beside reading
# weights, and what a plan takes in all services. Significant for small models only.
_PASS_BYTES: Final = 3e6
_PLAN_BYTES: Final = 10e6
# Of sampling and comparing the drafts of a step, however many.
_VERIFYING_BYTES: Final = 4e6
# Of computing and sampling one token more in a pass: its share of the target's weights.
_TOKEN_SHARE: Final = 0.05


@dataclass(frozen=True)
class DraftPrice:
    """What the parts of a step take, in any unit of time."""

    plan: float  # the plan of a step, in all services
    target_pass: float  # for one token
    token: float  # for each token more
    draft_pass: float
    verifying: float  # of a step with drafts

    @classmethod
    def of(cls, draft_bytes: float, target_bytes: float) -> "DraftPrice":
        """By the bytes of the weights of both models."""
        return cls(
            plan=_PLAN_BYTES,
            target_pass=target_bytes + _PASS_BYTES,
            token=_TOKEN_SHARE * target_bytes,
            draft_pass=draft_bytes + _PASS_BYTES,
            verifying=_VERIFYING_BYTES,
        )


class PricedLengths:
    """A row's acceptance p is the share of its tested drafts that were right; tested are those up
    to the first wrong one, and later ones count more. With k drafts a row gains 1 + p + p² + … + pᵏ
    tokens in a step.

    A step of R rows, m of which have k drafts, takes a pass of R + m*k tokens, k passes of the
    draft model, and a time to verify. The m rows of the greatest acceptance get the number of
    drafts that gives the most tokens per time. Of a row's drafts, those are left out that are not
    worth the time of their token. Rows without get one draft in every 32nd step. All of it depends
    on numbers of steps and tokens, never on the clock.
    """

    def __init__(self, most: int, price: DraftPrice, max_num_seqs: int) -> None:
        self._price = price
        self._tested = np.full(max_num_seqs, _FIRST_TESTED)
        self._right = np.full(max_num_seqs, _FIRST_TESTED / 2)
        self._numbers = np.arange(1, most + 1)
        self._num_rows = 1
        self._is_one_of_rounds = False
        self._num_steps = 0  # with rows that may have drafts

    def begin_step(self, num_rows: int, *, is_one_of_rounds: bool) -> None:
        """The rows of the next step, with drafts or not, and whether its plan has several rounds:
        the plan's own time is then for all of them."""
        self._num_rows = num_rows
        self._is_one_of_rounds = is_one_of_rounds

    def admit(self, row: int) -> None:
        """Forget what was known of the row: it has another sequence."""
        self._tested[row], self._right[row] = _FIRST_TESTED, _FIRST_TESTED / 2

    def next(self, rows: Ints) -> Ints:
        """The most drafts of each of these rows in a step."""
        counts = self._best(rows)
        self._num_steps += 1
        if self._num_steps % _PAUSE == 0:
            counts[counts == 0] = 1
        return counts

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        """What became of the drafts of rows that had any."""
        tested = np.minimum(num_accepted + 1, num_drafts)
        self._tested[rows] = self._tested[rows] * _DECAY + tested
        self._right[rows] = self._right[rows] * _DECAY + num_accepted

    def _best(self, rows: Ints) -> Ints:
        """The numbers of drafts with the most tokens per time of all rows."""
        price, num_rows, numbers = self._price, self._num_rows, self._numbers
        acceptance = self._right[rows] / self._tested[rows]
        order = (-acceptance).argsort(kind="stable")
        powers = acceptance[order, None] ** numbers
        # [rows with drafts - 1, drafts - 1]
        gained = powers.cumsum(axis=1).cumsum(axis=0)
        num_drafts = numbers * np.arange(1, len(rows) + 1)[:, None]
        plan = 0.0 if self._is_one_of_rounds else price.plan
        without = plan + price.target_pass + (num_rows - 1) * price.token
        times = without + price.verifying + numbers * price.draft_pass + num_drafts * price.token
        rates = (num_rows + gained) / times
        counts = np.zeros(len(rows), np.int64)
        best = int(rates.argmax())
        rate = rates.flat[best]
        if rate > num_rows / without:
            num_passes = numbers[best % len(numbers)]
            counts[order] = np.minimum((powers > rate * price.token).sum(axis=1), num_passes)
        return counts

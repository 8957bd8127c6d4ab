"""How many drafts each row gets of a drafter that takes time for each of them."""

from typing import Final

import numpy as np

from worker_svc.plan.inputs import Ints

# What each step leaves of the counts of earlier ones.
_DECAY: Final = 0.875
# Drafts of a new row that count as tested before its first one, and half of them as right.
_FIRST_TESTED: Final = 2.0
# The price of computing one draft beside a row's last token, in passes of the target.
_VERIFYING: Final = 0.05
# Rows that drafts do not pay for have one in every `_PAUSE`th step only.
_PAUSE: Final = 32


class PricedLengths:
    """A row's acceptance p is the share of its tested drafts that were right; tested are those up
    to the first wrong one, and later ones count more.

    With k drafts a step gives 1 + p + p² + … + pᵏ tokens and takes 1 + k * price passes of the
    target. A row gets the k with the most tokens per pass. Where that is 0, it gets one draft in
    every 32nd step. All of it depends on numbers of steps and tokens, never on time.
    """

    def __init__(self, most: int, price: float, max_num_seqs: int) -> None:
        """`price` is that of one draft, in passes of the target."""
        self._tested = np.full(max_num_seqs, _FIRST_TESTED)
        self._right = np.full(max_num_seqs, _FIRST_TESTED / 2)
        self._pauses = np.zeros(max_num_seqs, np.int64)  # steps until a row has drafts again
        self._exponents = np.arange(most + 1)
        self._passes = 1 + self._exponents * (price + _VERIFYING)

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
        """The number of drafts with the most tokens per pass."""
        acceptance = self._right[rows] / self._tested[rows]
        tokens = (acceptance[:, None] ** self._exponents).cumsum(axis=1)
        best: Ints = (tokens / self._passes).argmax(axis=1)
        return best

"""How many drafts each row gets, by what became of its earlier ones."""

from typing import Final

import numpy as np

from worker_svc.plan.inputs import Ints

# The weight of a step's accepted share in a row's rate, and the rate of a row without drafts.
_WEIGHT: Final = 0.25
_FIRST_RATE: Final = 0.5
# Rows below this rate have drafts in every `_PAUSE`th step only.
_LOWEST_RATE: Final = 0.2
_PAUSE: Final = 32


class DraftLengths:
    """A row's rate is the exponentially weighted mean of the accepted shares of its drafts.

    A row gets `ceil(most * rate)` drafts. One whose rate is below 0.2 gets one draft in every 32nd
    step, until that is accepted. All of it depends on numbers of steps and tokens, never on time:
    a replayed recording drafts the same.
    """

    def __init__(self, most: int, max_num_seqs: int) -> None:
        self._most = most
        self._rates = np.full(max_num_seqs, _FIRST_RATE)
        self._pauses = np.zeros(max_num_seqs, np.int64)  # steps until a row has drafts again

    def admit(self, row: int) -> None:
        """Forget what was known of the row: it has another sequence."""
        self._rates[row] = _FIRST_RATE
        self._pauses[row] = 0

    def next(self, rows: Ints) -> Ints:
        """The most drafts of each of these rows in a step."""
        counts: Ints = np.ceil(self._most * self._rates[rows]).astype(np.int64)
        self._pauses[rows] -= 1
        counts[self._pauses[rows] > 0] = 0
        return counts

    def observe(self, rows: Ints, num_drafts: Ints, num_accepted: Ints) -> None:
        """What became of the drafts of rows that had any."""
        shares = num_accepted / num_drafts
        rates = self._rates[rows] + _WEIGHT * (shares - self._rates[rows])
        self._rates[rows] = rates
        self._pauses[rows] = np.where(rates < _LOWEST_RATE, _PAUSE, 0)

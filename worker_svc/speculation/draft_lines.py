"""Where the logits of a row's last token and of its drafts are."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_svc.plan.inputs import Ints


@dataclass(frozen=True)
class DraftLines:
    """Lines of logits of the rows that sample: first those of each row's last token, then those of
    each first draft, and so on."""

    token_indices: Ints  # of each line's token, in the flat batch
    num_drafts: Ints  # of each row
    lines: Ints  # [longest draft + 1, num_rows]; only the first `1 + num_drafts` of a row count

    @classmethod
    def of(cls, last_indices: Ints, num_drafts: Ints) -> "DraftLines":
        """`last_indices` are those of the rows' last tokens in the batch, drafts included."""
        places = np.arange(int(num_drafts.max(initial=0)) + 1)[:, None]
        has_line: NDArray[np.bool_] = places <= num_drafts
        indices = last_indices - num_drafts + places
        lines = has_line.cumsum().reshape(has_line.shape) - 1
        return cls(indices[has_line], num_drafts, lines)

    def of_rows(self, places: Ints) -> "DraftLines":
        """Those of some of the rows, in the same logits."""
        return DraftLines(self.token_indices, self.num_drafts[places], self.lines[:, places])

    @property
    def longest(self) -> int:
        """The most drafts of a row."""
        return len(self.lines) - 1

"""Counts of drafts by their position: right behind a row's last token, behind that, and so on."""

from collections.abc import Iterable
from itertools import zip_longest

import numpy as np

from worker_svc.plan.inputs import Ints


def by_position(counts: Ints) -> list[int]:
    """How many rows have a first draft, a second one, and so on; `counts` are those of each row."""
    places = np.arange(int(counts.max(initial=0)))
    numbers: list[int] = (counts[:, None] > places).sum(0).tolist()
    return numbers


def added_up(parts: Iterable[list[int]]) -> list[int]:
    """The sum of the counts of several steps, position by position."""
    return [sum(each) for each in zip_longest(*parts, fillvalue=0)]

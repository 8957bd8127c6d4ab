"""Whether servers wrote the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class Equality:
    """Outputs held against others of the same requests."""

    # Of tokens: those before the first that differs. Behind it a model writes another text.
    tokens: float
    # Of requests: those that are equal to their end.
    requests: float


def equality(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Equality | None:
    """Shares of equal tokens and outputs; None where one of the two tells no tokens.

    ValueError if they are not of the same requests.
    """
    pairs = list(zip(ours, theirs, strict=True))
    num_tokens = sum(max(len(one), len(other)) for one, other in pairs)
    if not any(ours) or not any(theirs):
        return None
    num_equal = sum(_common(one, other) for one, other in pairs)
    num_same = sum(list(one) == list(other) for one, other in pairs)
    return Equality(num_equal / num_tokens, num_same / len(pairs))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest prefix that both have."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)

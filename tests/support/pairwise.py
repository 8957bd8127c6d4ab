"""A small set of combinations that contains every pair of values of different factors."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = tuple[str, Any, str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy: each combination begins with a missing pair, and adds the values that contribute the
    most missing pairs."""
    missing: dict[Pair, None] = {
        (first, one, second, other): None
        for first, second in combinations(factors, 2)
        for one in factors[first]
        for other in factors[second]
    }
    found = []
    while missing:
        first, one, second, other = next(iter(missing))
        chosen = {first: one, second: other}
        for name in factors:
            if name not in chosen:
                values = factors[name]
                # Ties are broken so that values occur equally often.
                values = [*values[len(found) % len(values) :], *values[: len(found) % len(values)]]
                chosen[name] = max(values, key=lambda v: len(_new(missing, chosen | {name: v})))
        found.append({name: chosen[name] for name in factors})
        for pair in _new(missing, found[-1]):
            del missing[pair]
    return found


def _new(missing: Mapping[Pair, None], chosen: Mapping[str, Any]) -> list[Pair]:
    return [
        (first, one, second, other)
        for first, one, second, other in missing
        if first in chosen and chosen[first] == one and second in chosen and chosen[second] == other
    ]

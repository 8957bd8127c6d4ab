"""The log-probabilities that come with tokens from the scheduler. Pure."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import TypeVar

from quire.internal.v1 import scheduler_pb2

S = TypeVar("S", "array[int]", "array[float]", Sequence[int])


class MisfitError(Exception):
    """A frame's log-probabilities are not those of its tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Entries of one token: its own first, behind it the most likely ones.

    Arrays, because thousands of tokens may wait for a client that reads slowly.
    """

    token_ids: "array[int]"
    logprobs: "array[float]"
    ranks: "array[int]"


def logprobs_of(deltas: scheduler_pb2.TokenDeltas) -> Iterable[tuple[TokenLogprobs, ...]]:
    """For each entry of the deltas, one per token; empty where the request did not ask.
    MisfitError if they are not the tokens'.
    """
    if not deltas.HasField("logprobs"):
        return repeat((), len(deltas.num_tokens))
    told = deltas.logprobs
    num_entries = sum(told.num_entries)
    if len(told.num_entries) != len(deltas.token_ids):
        raise MisfitError(f"{len(told.num_entries)} counts for {len(deltas.token_ids)} tokens")
    columns = (array("I", told.token_ids), array("f", told.logprobs), array("I", told.ranks))
    if any(len(column) != num_entries for column in columns):
        raise MisfitError(
            f"{num_entries} entries counted, columns of {[len(column) for column in columns]}"
        )
    return list(_by_choice(deltas, *columns))


def _by_choice(
    deltas: scheduler_pb2.TokenDeltas,
    token_ids: "array[int]",
    logprobs: "array[float]",
    ranks: "array[int]",
) -> Iterator[tuple[TokenLogprobs, ...]]:
    counts = list(_cut(deltas.logprobs.num_entries, deltas.num_tokens))
    sizes = list(map(sum, counts))
    tokens = _cut(deltas.token_ids, deltas.num_tokens)
    columns = zip(_cut(token_ids, sizes), _cut(logprobs, sizes), _cut(ranks, sizes), strict=True)
    for own, widths, (ids, values, places) in zip(tokens, counts, columns, strict=True):
        if not ids:
            yield ()
            continue
        if len(set(widths)) != 1:
            raise MisfitError(f"tokens of one choice with {sorted(set(widths))} entries")
        its = tuple(
            map(TokenLogprobs, _cut(ids, widths), _cut(values, widths), _cut(places, widths))
        )
        if [one.token_ids[0] for one in its] != list(own):
            raise MisfitError("a token's own entry is not the first")
        yield its


def _cut(items: S, lengths: Iterable[int]) -> Iterator[S]:
    """Consecutive pieces of these lengths."""
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        yield items[begin:end]

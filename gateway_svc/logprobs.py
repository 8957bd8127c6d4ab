"""The log-probabilities that come with tokens from the scheduler. Pure."""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat

from quire.internal.v1 import scheduler_pb2

_ENTRY = struct.Struct("<IfI")
_TOKEN_ID = struct.Struct("<I")


class MisfitError(Exception):
    """A frame's log-probabilities are not those of its tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Entries of one token: its own first, behind it the most likely ones.

    Packed, because thousands of tokens may wait for a client that reads slowly.
    """

    packed: bytes

    def entries(self) -> Iterator[tuple[int, float, int]]:
        """Token id, log-probability and rank of each."""
        return _ENTRY.iter_unpack(self.packed)


def logprobs_of(deltas: scheduler_pb2.TokenDeltas) -> Iterable[tuple[TokenLogprobs, ...]]:
    """For each entry of the deltas, one per token; empty where the request did not ask.
    MisfitError if they are not the tokens'.
    """
    if not deltas.num_logprobs and not deltas.logprobs:
        return repeat((), len(deltas.num_tokens))
    if len(deltas.num_logprobs) != len(deltas.num_tokens):
        raise MisfitError(f"{len(deltas.num_logprobs)} counts, {len(deltas.num_tokens)} places")
    widths = [count * _ENTRY.size for count in deltas.num_logprobs]
    sizes = [width * count for width, count in zip(widths, deltas.num_tokens, strict=True)]
    if sum(sizes) != len(deltas.logprobs):
        raise MisfitError(f"{sum(sizes)} bytes counted, {len(deltas.logprobs)} came")
    return list(_by_place(deltas, widths, sizes))


def _by_place(
    deltas: scheduler_pb2.TokenDeltas, widths: list[int], sizes: list[int]
) -> Iterator[tuple[TokenLogprobs, ...]]:
    packed, token_ids = deltas.logprobs, list(deltas.token_ids)
    ends, token_ends = accumulate(sizes, initial=0), accumulate(deltas.num_tokens, initial=0)
    for width, (begin, end), (first, last) in zip(
        widths, pairwise(ends), pairwise(token_ends), strict=True
    ):
        if not width:
            yield ()
            continue
        starts = range(begin, end, width)
        if [_TOKEN_ID.unpack_from(packed, at)[0] for at in starts] != token_ids[first:last]:
            raise MisfitError("a token's own entry is not the first")
        yield tuple([TokenLogprobs(packed[at : at + width]) for at in starts])

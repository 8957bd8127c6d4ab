"""Events of a request, decoded from the scheduler's frames. Pure."""

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Self

from google.rpc import error_details_pb2, status_pb2

from quire.internal.v1 import scheduler_pb2
from quire.service.errors import RequestError

_LOGPROB_ENTRY = struct.Struct("<IfI")
_TOKEN_ID = struct.Struct("<I")


class LogprobsMismatchError(Exception):
    """A frame's log-probabilities do not match its tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Entries of one token: the sampled token's first, then those of the most likely tokens.

    Packed, because thousands of tokens may be queued for a slow client.
    """

    packed: bytes

    @classmethod
    def of_first(cls, token_id: int) -> Self:
        """Of the first token of a prompt, which has none: a single entry, not a number."""
        return cls(_LOGPROB_ENTRY.pack(token_id, math.nan, 0))

    def entries(self) -> Iterator[tuple[int, float, int]]:
        """Yield the token id, log-probability and rank of each entry."""
        return _LOGPROB_ENTRY.iter_unpack(self.packed)


@dataclass(frozen=True)
class Accepted:
    """The scheduler has accepted the request."""


@dataclass(frozen=True)
class NewTokens:
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    # One per token; empty unless requested.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # Of the prompt's tokens after the first one, packed; with the first token of choice 0.
    prompt_logprobs: bytes = b""


@dataclass(frozen=True)
class Ended:
    choice: int
    reason: scheduler_pb2.EndReason.ValueType
    # The stop token, where the reason is one.
    stop_token_id: int | None
    num_tokens: int
    num_cached_prompt_tokens: int


ChoiceEvent = NewTokens | Ended
Event = Accepted | ChoiceEvent


def decode_tokens(deltas: scheduler_pb2.TokenDeltas) -> list[tuple[int, NewTokens]]:
    """New tokens with their attachment numbers, one pair per entry. LogprobsMismatchError if the
    log-probabilities are not those of the tokens.
    """
    token_ids = tuple(deltas.token_ids)
    entries = zip(
        deltas.attachments,
        deltas.choices,
        deltas.first_indices,
        deltas.num_tokens,
        _unpack_logprobs(deltas),
        strict=True,
    )
    of_prompts = {found.entry: found.logprobs for found in deltas.prompt_logprobs}
    decoded: list[tuple[int, NewTokens]] = []
    start = 0
    for attachment, choice, first_index, count, logprobs in entries:
        ids = token_ids[start : start + count]
        of_prompt = of_prompts.get(len(decoded), b"")
        decoded.append((attachment, NewTokens(choice, first_index, ids, logprobs, of_prompt)))
        start += count
    return decoded


def split_prompt_logprobs(packed: bytes, num_tokens: int) -> list[TokenLogprobs]:
    """Split the log-probabilities of a prompt's tokens, equally many for each.
    LogprobsMismatchError if they cannot be."""
    if num_tokens == 0:
        return []
    width, rest = divmod(len(packed), num_tokens)
    if not width or rest or width % _LOGPROB_ENTRY.size:
        raise LogprobsMismatchError(f"{len(packed)} bytes for {num_tokens} tokens of a prompt")
    return [TokenLogprobs(packed[at : at + width]) for at in range(0, len(packed), width)]


def decode_end(end: scheduler_pb2.ChoiceEnd) -> Ended:
    return Ended(
        choice=end.choice,
        reason=end.reason,
        stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
        num_tokens=end.num_tokens,
        num_cached_prompt_tokens=end.num_cached_prompt_tokens,
    )


@dataclass(eq=False)
class EndedError(RequestError):
    """The error with which an accepted request has ended."""

    # The request's serialized ResumeState.
    opaque: bytes = b""


def decode_failure(failure: scheduler_pb2.RequestFailure) -> RequestError:
    status = status_pb2.Status(code=failure.code, message=failure.message, details=failure.details)
    if not failure.opaque:
        return RequestError.from_status(status)
    error = EndedError.from_status(status)
    error.opaque = failure.opaque
    return error


def retry_after_s(error: RequestError) -> float:
    """When to try again, as the error says; infinite if it does not."""
    retry = error.detail(error_details_pb2.RetryInfo)
    return math.inf if retry is None else retry.retry_delay.ToNanoseconds() / 1e9


def _unpack_logprobs(deltas: scheduler_pb2.TokenDeltas) -> Iterable[tuple[TokenLogprobs, ...]]:
    """Per entry of the deltas, the log-probabilities of its tokens; empty unless requested.
    LogprobsMismatchError if they do not match the tokens.
    """
    if not deltas.num_logprobs and not deltas.logprobs:
        return repeat((), len(deltas.num_tokens))
    if len(deltas.num_logprobs) != len(deltas.num_tokens):
        raise LogprobsMismatchError(
            f"{len(deltas.num_logprobs)} counts, {len(deltas.num_tokens)} entries"
        )
    widths = [count * _LOGPROB_ENTRY.size for count in deltas.num_logprobs]
    sizes = [width * count for width, count in zip(widths, deltas.num_tokens, strict=True)]
    if sum(sizes) != len(deltas.logprobs):
        raise LogprobsMismatchError(f"{sum(sizes)} bytes expected, {len(deltas.logprobs)} received")
    return list(_by_entry(deltas, widths, sizes))


def _by_entry(
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
            raise LogprobsMismatchError("the first entry of a token is not its own")
        yield tuple([TokenLogprobs(packed[at : at + width]) for at in starts])

"""Refuses requests whose format cannot begin because of their other parameters."""

from gateway_svc.structured.first_tokens import FirstTokens
from quire.internal.v1 import logits_pb2
from quire.service.errors import invalid

_BAD_WORDS = "sampling_params.bad_words"
_STOP_TOKENS = "sampling_params.stop_token_ids"


def check_first_token(
    changes: logits_pb2.LogitsParams, first: FirstTokens, sets_stop_tokens: bool
) -> None:
    """RequestError if no token is possible. What shows only later in the output is found by the
    worker, which gives the same error. `sets_stop_tokens`: the request has some of its own."""
    stop_field = _STOP_TOKENS if sets_stop_tokens else changes.grammar.field
    stops, allowed = set(changes.stop_token_ids), set(changes.allowed_token_ids)
    bad_words = _single_tokens(changes)
    ends = (stops & allowed if allowed else stops) - bad_words
    begins_after = changes.grammar.begins_after_token_ids
    stops_in_marker = sets_stop_tokens and not stops.isdisjoint(begins_after)
    if stops_in_marker and not first.may_end:
        raise invalid(
            _STOP_TOKENS,
            "NO_POSSIBLE_TOKEN",
            "excludes a token of the reasoning's end marker, after which the format can begin",
        )
    if begins_after or (first.may_end and ends):
        return
    if allowed:
        field, is_possible = (
            "sampling_params.allowed_token_ids.ids",
            first.any_of(allowed - bad_words, stops),
        )
    else:
        field = _BAD_WORDS if bad_words else stop_field
        is_possible = first.any_without(bad_words, stops)
    if not is_possible:
        raise invalid(
            field,
            "NO_POSSIBLE_TOKEN",
            "begins with a special token that ends the output; leave it out"
            if field == changes.grammar.field
            else "excludes every token with which the format of the output can begin",
        )


def _single_tokens(changes: logits_pb2.LogitsParams) -> set[int]:
    """Bad words of one token, which are impossible everywhere."""
    found, start = set(), 0
    for length in changes.bad_words_lengths:
        if length == 1:
            found.add(changes.bad_words_token_ids[start])
        start += length
    return found

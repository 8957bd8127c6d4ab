"""Compares the log-probabilities of two runs, exactly or within a tolerance."""

import math

from quire.client.outputs import TokenLogprobs


def same_logprobs(one: TokenLogprobs, other: TokenLogprobs, tolerance: float) -> bool:
    """Return whether both are the same: identical without a tolerance.

    With one, values may differ by the tolerance, and tokens whose values are that close may be in
    another order; the last of them may be replaced by a token that the other run does not list.
    """
    if not tolerance:
        return list(one.items()) == list(other.items())
    # The sampled token, the first, may be among the most likely tokens in only one of the runs.
    return (
        list(one)[:1] == list(other)[:1]
        and abs(len(one) - len(other)) <= 1
        and _is_within(one, other, tolerance)
        and _is_within(other, one, tolerance)
    )


def _is_within(one: TokenLogprobs, other: TokenLogprobs, tolerance: float) -> bool:
    """Return whether each token has its value in the other run, or is at most as likely as the
    least likely token listed there without a gap in the ranks."""
    least = min(
        (found.logprob for found in other.values() if found.rank <= len(other)), default=-math.inf
    )
    for token_id, entry in one.items():
        found = other.get(token_id)
        if found is None:
            if entry.logprob > least + tolerance:
                return False
        elif (
            abs(entry.logprob - found.logprob) > tolerance
            or entry.decoded_token != found.decoded_token
        ):
            return False
    return True

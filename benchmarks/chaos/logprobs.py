"""Whether two accounts of how likely a token was are the same."""

import math

from quire.outputs import TokenLogprobs


def same_logprobs(one: TokenLogprobs, other: TokenLogprobs, tolerance: float) -> bool:
    """Without a tolerance in everything. With one the values count, and what token they are of
    where they are farther apart: equals change places, the last place with what is not told, too.
    """
    if not tolerance:
        return list(one.items()) == list(other.items())
    # The sampled token, the first, may be one of the most likely ones here, and not there.
    return (
        list(one)[:1] == list(other)[:1]
        and abs(len(one) - len(other)) <= 1
        and _is_within(one, other, tolerance)
        and _is_within(other, one, tolerance)
    )


def _is_within(one: TokenLogprobs, other: TokenLogprobs, tolerance: float) -> bool:
    """Each token has its value in the other, or is not likelier than the least likely that is told
    there without a gap in the ranks."""
    least = min(
        (found.logprob for found in other.values() if found.rank <= len(other)), default=-math.inf
    )
    for token_id, told in one.items():
        found = other.get(token_id)
        if found is None:
            if told.logprob > least + tolerance:
                return False
        elif (
            abs(told.logprob - found.logprob) > tolerance
            or told.decoded_token != found.decoded_token
        ):
            return False
    return True

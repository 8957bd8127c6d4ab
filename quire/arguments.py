"""Refuses what no caller can have meant, by the argument's name and with its value.

Each check passes None, which leaves a choice to the server.
"""

import math
import numbers
from collections.abc import Sequence

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
# Three years. gRPC takes a deadline beyond what it can count for one that has passed.
_LONGEST_TIMEOUT_S = 1e8


def check_integer(name: str, value: object, maximum: int, minimum: int = 0) -> None:
    """What its field can carry; counts, ids and seeds are never negative."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise wrong_type(name, "an integer", value)
    if int(value) < minimum:
        least = f"be at least {minimum}" if minimum else "not be negative"
        raise ValueError(f"{name}: must {least} (got {value!r})")
    if int(value) > maximum:
        raise ValueError(f"{name}: must be at most {maximum} (got {value!r})")


def check_number(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise wrong_type(name, "a number", value)


def check_flag(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise wrong_type(name, "True or False", value)


def check_text(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise wrong_type(name, "a text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # A byte of a command line that is no UTF-8, or half of a surrogate pair.
        raise ValueError(f"{name}: no valid UTF-8 at character {error.start}") from None


def check_token_ids(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise wrong_type(name, "a list of token ids", value)
    # The usual ones cost little: there may be a million.
    if not value or (
        set(map(type, value)) == {int} and 0 <= min(value) <= max(value) <= UINT32_MAX
    ):
        return
    for index, token_id in enumerate(value):
        _check_token_id(f"{name}[{index}]", token_id)


def deadline(name: str, timeout_s: float | None) -> float | None:
    """The timeout as gRPC wants it; one that is infinite, or years away, is none."""
    check_number(name, timeout_s)
    if timeout_s is None:
        return None
    if math.isnan(timeout_s) or timeout_s < 0:
        raise ValueError(f"{name}: must be a number of seconds from 0 (got {timeout_s!r})")
    return float(timeout_s) if timeout_s <= _LONGEST_TIMEOUT_S else None


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name}: must be {expected} (got {value!r:.100})")


def _check_token_id(name: str, value: object) -> None:
    if value is None:
        raise wrong_type(name, "an integer", value)
    check_integer(name, value, UINT32_MAX)

"""Checks of arguments. Errors have the argument's name and value.

Each check accepts None, which selects the server's default.
"""

import json
import math
import numbers
from collections.abc import Mapping, Sequence

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
# Three years. A deadline that overflows gRPC's clock is treated as expired.
_LONGEST_TIMEOUT_S = 1e8


def check_integer(name: str, value: object, maximum: int, minimum: int = 0) -> None:
    """TypeError or ValueError unless the value is an integer within the limits."""
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
        # An undecodable byte of a command line, or a lone surrogate.
        raise ValueError(f"{name}: no valid UTF-8 at character {error.start}") from None


def check_texts(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise wrong_type(name, "a list of texts", value)
    for index, text in enumerate(value):
        if text is None:
            raise wrong_type(f"{name}[{index}]", "a text", text)
        check_text(f"{name}[{index}]", text)


def check_json(name: str, value: object) -> None:
    """TypeError or ValueError unless the value is an object that JSON can contain."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong_type(name, "an object with texts as keys", value)
    try:
        json.dumps(dict(value), allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # A lone surrogate.
        raise ValueError(f"{name}: has a text that is no valid UTF-8") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"{name}: not representable as JSON: {error}") from None


def check_token_ids(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise wrong_type(name, "a list of token ids", value)
    # Fast path: a list may have a million ids.
    if not value or (
        set(map(type, value)) == {int} and 0 <= min(value) <= max(value) <= UINT32_MAX
    ):
        return
    for index, token_id in enumerate(value):
        if token_id is None:
            raise wrong_type(f"{name}[{index}]", "an integer", token_id)
        check_integer(f"{name}[{index}]", token_id, UINT32_MAX)


def deadline(name: str, timeout_s: float | None) -> float | None:
    """Convert a timeout for gRPC. One that is infinite or longer than three years is None."""
    check_number(name, timeout_s)
    if timeout_s is None:
        return None
    if math.isnan(timeout_s) or timeout_s < 0:
        raise ValueError(f"{name}: must be a number of seconds from 0 (got {timeout_s!r})")
    return float(timeout_s) if timeout_s <= _LONGEST_TIMEOUT_S else None


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name}: must be {expected} (got {value!r:.100})")

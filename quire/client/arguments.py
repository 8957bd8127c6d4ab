"""Checks of arguments. Errors have the argument's name and value.

Each check accepts None, which selects the server's default.
"""

import json
import math
import numbers
from collections.abc import Mapping, Sequence

from google.protobuf import struct_pb2

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
# Three years. A deadline that overflows gRPC's clock is treated as expired.
_LONGEST_TIMEOUT_S = 1e8
# Protobuf reads 100 messages inside one another: a request, and three for each level of a Struct.
_MAX_STRUCT_LEVELS = 32


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
    try:
        float(value or 0)
    except OverflowError:
        raise ValueError(f"{name}: must be a number of 64 bits (got a larger one)") from None


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
    except RecursionError:
        raise ValueError(f"{name}: is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: not representable as JSON: {error}") from None


def to_struct(name: str, value: object) -> struct_pb2.Struct | None:
    """Convert an object of any JSON; None if it is absent or empty. TypeError or ValueError for
    what a message cannot contain."""
    check_json(name, value)
    if not isinstance(value, Mapping) or not value:
        return None
    # As JSON has it: keys of inner objects are texts, and tuples lists.
    plain = json.loads(json.dumps(dict(value)))
    if _num_levels(plain) > _MAX_STRUCT_LEVELS:
        raise ValueError(f"{name}: is nested in more than {_MAX_STRUCT_LEVELS} levels")
    struct = struct_pb2.Struct()
    try:
        struct.update(plain)
    except OverflowError:
        raise ValueError(f"{name}: has a number of more than 64 bits") from None
    return struct


def _num_levels(value: object) -> int:
    """The number of objects and lists inside one another."""
    num_levels, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        num_levels += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return num_levels


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

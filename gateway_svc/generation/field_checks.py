"""Checks of single values. Pure; errors name the field."""

import math
from collections.abc import Sequence

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import FloatValue

from quire.service.errors import RequestError, invalid


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids or max(token_ids) < vocab_size:
        return
    at, id_ = next((at, id_) for at, id_ in enumerate(token_ids) if id_ >= vocab_size)
    raise outside_vocabulary(f"{field}[{at}]", id_, vocab_size)


def check_tokens_of_text(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a text with a token that the model lacks. Its index is not one of the field."""
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise invalid(
            field,
            "TOKEN_ID_OUTSIDE_VOCABULARY",
            f"has the token {highest}, and the model has only those of 0 to {vocab_size - 1}",
        )


def outside_vocabulary(field: str, token_id: int, vocab_size: int) -> RequestError:
    return invalid(
        field,
        "TOKEN_ID_OUTSIDE_VOCABULARY",
        f"is {token_id}; token ids are 0 to {vocab_size - 1}",
    )


def check_length(field: str, reason: str, text: str, maximum: int) -> None:
    if not 1 <= len(text) <= maximum:
        raise invalid(field, reason, f"has {len(text)} characters; 1 to {maximum} are allowed")


def check_at_most(field: str, reason: str, count: int, maximum: int, unit: str = "entries") -> None:
    if count > maximum:
        raise invalid(field, reason, f"has {count} {unit}; at most {maximum} are allowed")


def check_is_json(field: str, values: Struct) -> None:
    """Refuse numbers that are not finite, which JSON does not have."""
    try:
        json_format.MessageToDict(values)
    except ValueError:
        raise invalid(field, "NOT_FINITE", "has a number that is not finite") from None


def out_of_range(field: str, value: float, allowed: str) -> RequestError:
    reason = f"{field.rpartition('.')[2].partition('[')[0].upper()}_OUT_OF_RANGE"
    if isinstance(value, float) and (value == 0 or math.isinf(value)):
        # The client may have sent a number that a 32-bit float cannot hold.
        return invalid(field, reason, f"must be {allowed}")
    shown = _shortest(value) if isinstance(value, float) else value
    return invalid(field, reason, f"is {shown}; must be {allowed}")


def _shortest(value: float) -> str:
    """The shortest decimal that identifies a 32-bit float: most likely what the client wrote."""
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    same = (text for text in texts if FloatValue(value=float(text)).value == value)
    return next(same, str(value))

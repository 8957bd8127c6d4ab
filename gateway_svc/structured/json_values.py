"""JSON of clients as values, without what no UTF-8 or no double has. Pure."""

import json
import math
import re
from typing import Any, Final, NoReturn

from gateway_svc.structured.errors import FormatError

_SPACE: Final = re.compile(r"[ \t\r\n]*")


def read_json(text: str) -> Any:
    """FormatError for what is no JSON."""
    value, end = read_json_within(text, 0)
    if end < len(text):
        raise FormatError(f"is not JSON: there is more behind character {end}")
    return value


def read_json_within(text: str, start: int) -> tuple[Any, int]:
    """The value from a position on, and the position behind it and the space that follows."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_space(text, start))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FormatError("has half of a surrogate pair, which is no character") from error
    except ValueError as error:
        raise FormatError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise FormatError("is nested too deeply") from error
    return value, _skip_space(text, end)


def _skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a value")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text:.40} is too large")
    return number


def _integer(text: str) -> int:
    _finite(text)
    return int(text)


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, parse_int=_integer)

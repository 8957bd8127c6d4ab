"""Finds the field that pydantic's errors of a body are about, and describes what it must be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from quire.service.errors import RequestError, invalid

Path = tuple[int | str, ...]
# The rest of an error's location, and the error.
Located = tuple[Path, ErrorDetails]

_MAX_KEY = 64
# Later errors of a body with thousands are ignored, which takes less time.
_MAX_ERRORS = 4096
# What a value of each type of error must be.
_TYPES = {
    "string_type": "a string",
    "list_type": "an array",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "dict_type": "an object",
    "model_type": "an object",
}
_LENGTHS = ("too_short", "too_long")
# By the type of an error; the arguments are its context.
_DESCRIPTIONS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "too_short": "has {actual_length} entries; at least {min_length} is needed",
    "too_long": "has {actual_length} entries; at most {max_length} are allowed",
    "finite_number": "must be finite",
    "string_unicode": "has half of a surrogate pair, which is no character",
}


@dataclass(frozen=True)
class FieldFailure:
    """A field that is invalid."""

    # Its keys and indices, without pydantic's names of a union's alternatives.
    path: Path
    value: object
    # More than one if all alternatives of a union refuse the value's type.
    errors: tuple[ErrorDetails, ...]

    @classmethod
    def of(cls, error: ValidationError, body: object) -> "FieldFailure":
        """The first field that is invalid: of a union, in the alternative that fits best."""
        # The input is not part of the errors: it may be a prompt.
        details = error.errors(include_input=False, include_url=False)[:_MAX_ERRORS]
        return _find([(detail["loc"], detail) for detail in details], body, ())

    @property
    def kind(self) -> str:
        return self.errors[0]["type"]

    @property
    def is_of_type(self) -> bool:
        """Whether the value is none of those that its field accepts, whatever their range."""
        return self.kind in _TYPES or self.kind == "literal_error"

    @property
    def is_large_number(self) -> bool:
        """Whether the value may be an integer of more than 64 bits, which orjson reads as a
        float; that of -2**63 - 1 is -2**63."""
        return isinstance(self.value, float) and not -(2**63) < self.value < 2**64

    def request_error(self) -> RequestError:
        field = _text(self.path) or "body"
        if self.kind == "extra_forbidden":
            return invalid(field, "UNKNOWN_FIELD", "is not a field of this request; remove it")
        if self.kind == "missing":
            return invalid(field, "MISSING_FIELD", "is required")
        if self.kind == "unsupported":
            return invalid(field, "UNSUPPORTED_FIELD", self.errors[0]["msg"])
        if self.kind == "too_deep":
            return invalid(field, "TOO_DEEP", self.errors[0]["msg"])
        return invalid(field, "INVALID_FIELD", self._description())

    def _description(self) -> str:
        if self.is_of_type:
            return f"must be {_any_of(self.errors)}"
        error = self.errors[0]
        if self.kind in _DESCRIPTIONS:
            return _DESCRIPTIONS[self.kind].format(**error.get("ctx", {}))
        return error["msg"][:1].lower() + error["msg"][1:].removesuffix(".")


def _find(located: list[Located], value: object, path: Path) -> FieldFailure:
    """The failure of the value at a path, or of the first invalid value within."""
    groups: dict[int | str, list[Located]] = {}
    for rest, detail in located:
        if not rest:
            return FieldFailure(path, value, (detail,))
        groups.setdefault(rest[0], []).append((rest[1:], detail))
    first = next(iter(groups))
    if _is_alternative(first, groups[first], value):
        return _best([_find(group, value, path) for group in groups.values()], path)
    # A literal says what kind of object it is, and so which other fields it has.
    part = next((one for one, group in groups.items() if _is_literal(group)), first)
    return _find(groups[part], _inner(value, part), (*path, part))


def _is_alternative(part: int | str, group: list[Located], value: object) -> bool:
    """Whether a part of a location names an alternative of a union, which the value has no key
    for."""
    if isinstance(part, int) or (isinstance(value, Mapping) and part in value):
        return False
    rest, detail = group[0]
    return bool(rest) or detail["type"] != "missing"


def _is_literal(group: list[Located]) -> bool:
    rest, detail = group[0]
    return not rest and detail["type"] == "literal_error"


def _inner(value: object, part: int | str) -> object:
    """An entry; None if there is none."""
    if isinstance(value, Mapping):
        return value.get(part)
    return value[part] if isinstance(value, list) and isinstance(part, int) else None


def _best(failures: list[FieldFailure], path: Path) -> FieldFailure:
    """The failure of the alternative that was read furthest. If its value has a wrong type, those
    of all alternatives that expect another type there."""
    best = max(failures, key=lambda failure: _progress(failure, path))
    if not best.is_of_type:
        return best
    same = [one for one in failures if one.path == best.path and one.is_of_type]
    return FieldFailure(best.path, best.value, tuple(error for one in same for error in one.errors))


def _progress(failure: FieldFailure, path: Path) -> tuple[object, ...]:
    """How far an alternative of a union at a path was read. Greater is further."""
    within = [part if isinstance(part, int) else 0 for part in failure.path[len(path) :]]
    indices: list[float] = [*within]
    if failure.kind in _LENGTHS:
        # All entries that are allowed were valid.
        indices.append(math.inf)
    is_literal = failure.kind == "literal_error"
    # Another kind of object lacks fields that this one does not have.
    is_missing = failure.kind == "missing"
    return len(indices), not is_literal, indices, not is_missing, not failure.is_of_type


def _any_of(errors: tuple[ErrorDetails, ...]) -> str:
    """What the errors accept, such as "a string, an array or an object"."""
    accepted = dict.fromkeys(one for error in errors for one in _accepted(error))
    *others, last = accepted
    return f"{', '.join(others)} or {last}" if others else last


def _accepted(error: ErrorDetails) -> list[str]:
    if error["type"] != "literal_error":
        return [_TYPES[error["type"]]]
    return str(error["ctx"]["expected"]).replace(" or ", ", ").split(", ")


def _text(path: Path) -> str:
    """A path as a text, such as `messages[0].content`."""
    text = ""
    for part in path:
        if isinstance(part, str):
            part = part[:_MAX_KEY]
        if isinstance(part, str) and part.isidentifier():
            text += f".{part}" if text else part
        elif isinstance(part, int) or part.isdecimal():
            text += f"[{part}]"
        else:
            text += f"[{part!r}]"
    return text

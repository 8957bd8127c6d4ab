"""Values of keywords: what has no effect is left out, and what the library misreads is refused or
narrowed."""

import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from itertools import groupby
from typing import Any, Final

from gateway_svc.structured.patterns import ends_in_backslash, of_schema
from gateway_svc.structured.schema_parts import is_number, is_version_4, refused

# The library's numbers are doubles, written with 15 digits.
_MAX_DIGITS: Final = 15
_MAX_INTEGER: Final = 2**53
# The last double of 15 digits that the library's int64 holds. Both bounds at or below -2**63 end
# the process; above 2**63 they allow one number, which is wrong.
_MAX_BOUND: Final = 9_223_372_036_854_400_000
_BOUNDS: Final = {
    "minimum": ROUND_CEILING,
    "exclusiveMinimum": ROUND_CEILING,
    "maximum": ROUND_FLOOR,
    "exclusiveMaximum": ROUND_FLOOR,
}
# Each may be the next one, which takes four of the library's 2,000 items per token.
_MAX_OPTIONAL: Final = 480
# Values with which a keyword allows everything.
_WITHOUT_EFFECT: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
# Without the second keyword the first has no effect.
_DEPENDENT: Final = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
}
_IN_PLACE: Final = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"),
        *("dependentSchemas", "dependencies", "contains"),
    )
)
# Texts for readers, and options of the library's own.
_UNREAD: Final = (
    "title",
    "description",
    "$comment",
    "default",
    "examples",
    "contentSchema",
    "x-guidance",
)
# Formats that any text has: hints for forms and programs.
_ANY_TEXT: Final = ("password", "binary", "path")
# In these, `items` may be a list.
_LISTED_ITEMS: Final = re.compile(r"draft-0\d\b|2019-09")


def prepare(path: str, part: dict[str, Any], dialect: str) -> None:
    """Change one schema, without those within it, to what the library reads well. FormatError at a
    keyword that cannot be followed. `dialect` is the document's `$schema`."""
    for keyword in _UNREAD:
        part.pop(keyword, None)
    for keyword in [*part]:
        if _is_without_effect(keyword, part):
            del part[keyword]
    # Without other schemas of the same value, the same.
    others = "additionalItems" if isinstance(part.get("items"), list) else "items"
    for keyword, same in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", others),
    ):
        if part.get(keyword) is False and _IN_PLACE.isdisjoint(part):
            del part[keyword]
            part.setdefault(same, False)
    _check_dialect(path, part, dialect)
    if is_number(part.get("multipleOf")) and part["multipleOf"] <= 0:
        raise refused("multipleOf", path, f"is {part['multipleOf']}; it must be above 0")
    _check_optional(path, part)
    for keyword in ("enum", "const"):
        for number in _numbers(part.get(keyword)):
            _check_written(keyword, path, number)
    for keyword, rounding in _BOUNDS.items():
        if is_number(part.get(keyword)):
            _check_bound(keyword, path, part[keyword], rounding)
            part[keyword] = _rounded(part[keyword], rounding, keyword.startswith("exclusive"))
    _prepare_patterns(path, part)


def _prepare_patterns(path: str, part: dict[str, Any]) -> None:
    pattern, by_pattern = part.get("pattern"), part.get("patternProperties")
    if isinstance(pattern, str):
        part["pattern"] = _prepared_pattern("pattern", path, pattern)
    if isinstance(by_pattern, dict):
        part["patternProperties"] = prepared = {
            _prepared_pattern("patternProperties", path, one): by_pattern[one] for one in by_pattern
        }
        if len(prepared) < len(by_pattern):
            raise refused("patternProperties", path, "has a pattern in two forms; remove one")


def _prepared_pattern(keyword: str, path: str, pattern: str) -> str:
    if ends_in_backslash(pattern):
        reason = f"ends in a backslash that escapes nothing: {pattern:.80}; remove or double it"
        raise refused(keyword, path, reason)
    return of_schema(pattern)


def _is_without_effect(keyword: str, part: dict[str, Any]) -> bool:
    if keyword == "if":
        return "then" not in part and "else" not in part
    if keyword in _DEPENDENT:
        return _DEPENDENT[keyword] not in part
    if keyword == "additionalItems":
        # The library would read no `prefixItems` beside it.
        return not isinstance(part.get("items"), list)
    value = part[keyword]
    if keyword == "format":
        return value in _ANY_TEXT
    if keyword == "uniqueItems" and is_number(part.get("maxItems")) and part["maxItems"] <= 1:
        return True
    if keyword == "propertyNames" and isinstance(value, dict):
        read = {name: one for name, one in value.items() if name not in _UNREAD}
        return read in ({}, {"type": "string"})
    # 0 is False, but no schema.
    return any(
        type(value) is type(one) and value == one for one in _WITHOUT_EFFECT.get(keyword, ())
    )


def _check_dialect(path: str, part: dict[str, Any], dialect: str) -> None:
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(part.get(keyword), bool) and not is_version_4(dialect):
            raise refused(
                keyword, path, "is no number; booleans are of draft-04, which $schema would name"
            )
    if isinstance(part.get("items"), list) and not _LISTED_ITEMS.search(dialect):
        raise refused(
            "items", path, "is a list; use prefixItems, or name an older version in $schema"
        )


def _check_optional(path: str, part: dict[str, Any]) -> None:
    properties, required = part.get("properties"), part.get("required", ())
    if not isinstance(properties, dict) or not isinstance(required, list | tuple):
        return
    names = {name for name in required if isinstance(name, str)}
    runs = groupby(properties, lambda name: name in names)
    longest = max((len([*run]) for is_required, run in runs if not is_required), default=0)
    if longest > _MAX_OPTIONAL:
        raise refused(
            "properties",
            path,
            f"has {longest} optional properties in a row; at most {_MAX_OPTIONAL} are allowed",
        )


def _numbers(value: Any) -> Iterator[float]:
    """The numbers within a value."""
    remaining = [value]
    while remaining:
        one = remaining.pop()
        if isinstance(one, dict):
            remaining += one.values()
        elif isinstance(one, list):
            remaining += one
        elif is_number(one):
            yield one


def _check_written(keyword: str, path: str, number: float) -> None:
    if abs(number) > _MAX_INTEGER or (
        isinstance(number, float) and _num_digits(number) > _MAX_DIGITS
    ):
        raise refused(
            keyword,
            path,
            f"has the number {number!r:.40}; integers up to {_MAX_INTEGER} and other numbers of "
            f"{_MAX_DIGITS} digits can be followed",
        )


def _num_digits(number: float) -> int:
    return len(Decimal(str(number)).normalize().as_tuple().digits)


def _check_bound(keyword: str, path: str, number: float, rounding: str) -> None:
    """FormatError for a bound of which only numbers that the library does not hold are left."""
    if rounding == ROUND_CEILING and number > _MAX_BOUND:
        reason = f"at most {_MAX_BOUND} can be followed; lower it or remove it"
    elif rounding == ROUND_FLOOR and number < -_MAX_BOUND:
        reason = f"at least {-_MAX_BOUND} can be followed; raise it or remove it"
    else:
        return
    raise refused(keyword, path, f"is {number}; {reason}")


def _rounded(number: float, rounding: str, is_exclusive: bool) -> float:
    """A bound that the library reads exactly, and that allows nothing more. To the library, large
    ones are not exclusive: one more or less is the same double."""
    if abs(number) > _MAX_BOUND:
        return _MAX_BOUND if number > 0 else -_MAX_BOUND
    if isinstance(number, int) and abs(number) <= _MAX_INTEGER - is_exclusive:
        return number
    exact = Decimal(str(number))
    unit = Decimal(1).scaleb(exact.adjusted() - _MAX_DIGITS + 1)
    if rounding == ROUND_FLOOR:
        unit = -unit
    rounded = (exact / unit).to_integral_value(ROUND_CEILING) * unit
    # The doubles of large numbers are others than their digits say.
    while abs(rounded) > _MAX_INTEGER:
        distance = (Decimal(float(rounded)) - exact) * unit
        if distance > 0 or (distance == 0 and not is_exclusive):
            break
        rounded += unit
    if rounded == exact:
        return number
    return int(rounded) if isinstance(number, int) else float(rounded)

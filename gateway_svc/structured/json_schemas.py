"""JSON schemas as grammars, and what of a schema is refused.

The library refuses keywords that it does not know. What it would misread, or take too long for, is
refused here.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import prod
from typing import Any, Final

from llguidance import LLMatcher

from gateway_svc.structured.lark import MAX_QUANTIFIERS, num_quantifiers
from quire.service.grammars import summary

# As Python's json.dumps writes it, so that no output consists of white space, and all punctuation
# is forced.
FORM: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
_OPTIONS: Final = "x-guidance"
# Compiling takes 3 µs for each: a number's remainders are states of an automaton.
_MAX_REMAINDERS: Final = 10_000
_SCHEMAS_BY_NAME: Final = {"properties", "patternProperties", "$defs", "definitions"}
_NO_SCHEMAS: Final = {"enum", "const", "default", "examples"}
# The keyword that an error of the library is about, by the beginning of the error.
_KEYWORDS: Final = {
    "Unknown format": "format",
    "regex parse error": "pattern",
    "Unable to determine if regex": "pattern",
    "Invalid type": "type",
    "oneOf constraints": "oneOf",
    "Pointer": "$ref",
    "Resource": "$ref",
    "Anchor": "$ref",
    "Failed to generate regex for": "minimum",
}
_UNKNOWN: Final = re.compile(r"Unimplemented keys: (\[.*?\])")


class SchemaError(ValueError):
    """A schema that is refused; the message names the keyword and its place."""


def read_schema(text: str) -> dict[str, Any]:
    """SchemaError for what is no schema. Options of the library are left out."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise SchemaError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise SchemaError("is nested too deeply") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("is not an object, as a schema is")
    check_schema(schema)
    for _, part in _parts(schema, "#"):
        part.pop(_OPTIONS, None)
    return schema


def to_definition(schema: Mapping[str, Any]) -> str:
    """The grammar of a schema."""
    text = json.dumps(schema, ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text, overrides=FORM)  # type: ignore[arg-type]


def check_schema(schema: dict[str, Any]) -> None:
    """SchemaError for what the library would misread, or take long to compile."""
    try:
        parts = list(_parts(schema, "#"))
    except RecursionError as error:
        raise SchemaError("is nested too deeply") from error
    _check_patterns(parts)
    # Parts of `allOf` are merged, and so are their numbers.
    merges = any("allOf" in part or ("$ref" in part and len(part) > 1) for _, part in parts)
    _check_multiples(parts, merges)
    ranges = [(path, _Range(part)) for path, part in parts]
    if merges:
        ranges += [("#", _Range.merged(part for _, part in parts))]
    for path, found in ranges:
        if keyword := found.misread():
            raise SchemaError(
                f"the keyword {keyword} at {path} is not supported with a whole number and another "
                "bound less than 1 away"
            )


def explain(reason: str, schema: Mapping[str, Any]) -> str:
    """An error of the library, with the keyword that it is about and its place."""
    if found := _UNKNOWN.match(reason):
        keywords = json.loads(found[1])
        return f"the keyword {_with_place(keywords[0], schema)} is not supported"
    for beginning, keyword in _KEYWORDS.items():
        if reason.startswith(beginning):
            return f"the keyword {_with_place(keyword, schema)} is refused: {summary(reason)}"
    return f"is refused: {summary(reason)}"


def _with_place(keyword: str, schema: Mapping[str, Any]) -> str:
    places = [path for path, part in _parts(schema, "#") if keyword in part]
    return f"{keyword} at {places[0]}" if places else keyword


def _parts(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas within a schema, itself first, each with its place."""
    if isinstance(schema, list):
        for at, item in enumerate(schema):
            yield from _parts(item, f"{path}/{at}")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in list(schema.items()):
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield from _parts(part, f"{path}/{keyword}/{name}")
        elif keyword not in _NO_SCHEMAS:
            yield from _parts(value, f"{path}/{keyword}")


def _check_patterns(parts: list[tuple[str, dict[str, Any]]]) -> None:
    found = [
        (num_quantifiers(pattern), f"{keyword} at {path}")
        for path, part in parts
        for keyword in ("pattern", "patternProperties")
        for pattern in _texts(part.get(keyword))
    ]
    if sum(number for number, _ in found) > MAX_QUANTIFIERS:
        raise SchemaError(
            f"the keyword {max(found)[1]} has too many quantifiers: the patterns of a schema may "
            f"have {MAX_QUANTIFIERS}"
        )


def _texts(value: Any) -> list[str]:
    """A pattern, or those of `patternProperties`."""
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, dict) else []


def _check_multiples(parts: list[tuple[str, dict[str, Any]]], merges: bool) -> None:
    found = [
        (path, _digits(part["multipleOf"]))
        for path, part in parts
        if _is_number(part.get("multipleOf"))
    ]
    numbers = [number for _, number in found]
    if numbers and (prod(numbers) if merges else sum(numbers)) > _MAX_REMAINDERS:
        path = max(found, key=lambda one: one[1])[0]
        raise SchemaError(
            f"the keyword multipleOf at {path} is too large: the numbers of a schema, without "
            f"their decimal points, may add up to {_MAX_REMAINDERS}, and their product with allOf"
        )


def _digits(number: float) -> int:
    """The digits of a number, without leading and trailing zeros."""
    digits = Decimal(str(number)).as_tuple().digits
    return int("".join(map(str, digits)).strip("0") or "1")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Range:
    """The bounds of numbers in one schema."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        self._bounds = {
            keyword: [part[keyword]] if _is_number(part.get(keyword)) else []
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        }
        self._is_integer = part.get("type") == "integer"

    @classmethod
    def merged(cls, parts: Iterator[Mapping[str, Any]]) -> "_Range":
        """All bounds of several schemas."""
        merged = cls({})
        for part in parts:
            for keyword, bounds in cls(part)._bounds.items():
                merged._bounds[keyword] += bounds
        return merged

    def misread(self) -> str | None:
        """The keyword of an excluded whole number that llguidance 1.9 allows, written without a
        decimal point, because the other bound lies before the next whole number."""
        if self._is_integer:
            return None
        lows = self._bounds["minimum"] + self._bounds["exclusiveMinimum"]
        highs = self._bounds["maximum"] + self._bounds["exclusiveMaximum"]
        for keyword, others in (("exclusiveMinimum", highs), ("exclusiveMaximum", lows)):
            for bound in self._bounds[keyword]:
                if bound == int(bound) and any(0 < abs(other - bound) < 1 for other in others):
                    return keyword
        return None

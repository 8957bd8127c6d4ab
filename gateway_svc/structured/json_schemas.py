"""JSON schemas as grammars, and what of a schema is refused.

The library refuses keywords that it does not know. What it would misread, or take too long for, is
refused here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from math import prod
from typing import Any, Final

from llguidance import LLMatcher

from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.json_values import read_json
from gateway_svc.structured.patterns import MAX_QUANTIFIERS, num_quantifiers
from gateway_svc.structured.schema_merges import check_merged_patterns
from gateway_svc.structured.schema_names import check_names
from gateway_svc.structured.schema_parts import document_parts, is_number, refused
from gateway_svc.structured.schema_references import check_ids, check_references, check_targets
from gateway_svc.structured.schema_values import prepare
from gateway_svc.structured.schema_writing import written

# As Python's json.dumps writes it, so that no output consists of white space, and all punctuation
# is forced.
FORM: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
OPTIONS: Final = "x-guidance"
# Compiling takes 3 µs for each: a number's remainders are states of an automaton.
_MAX_REMAINDERS: Final = 10_000
# The library compares each pattern of an object with all others: 100 take up to 0.9 s.
_MAX_PROPERTY_PATTERNS: Final = 100
# Of which only one applies, beside what else applies to the value.
_ALTERNATIVES: Final = ("anyOf", "oneOf")
# Keywords by which a value, or what it consists of, may have numbers or patterns of properties.
_MERGED: Final = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("properties", "patternProperties", "additionalProperties"),
        *("items", "prefixItems", "additionalItems"),
        *("allOf", "$ref", *_ALTERNATIVES),
    )
)
_Parts = list[tuple[str, dict[str, Any]]]


def read_schema(text: str) -> dict[str, Any]:
    """The schema as the library reads it well. FormatError if it is refused."""
    return prepare_schema(read_json(text))


def prepare_schema(schema: Any, root: str = "#") -> dict[str, Any]:
    """The schema, which is changed, as the library reads it well. FormatError for what it would
    misread, or take long to compile. `root` is the place of the schema within a format."""
    if schema is True:
        return {}
    whole = "" if root == "#" else f"the schema at {root} "
    if schema is False:
        raise FormatError(f"{whole}is false, which no value satisfies; use one that allows some")
    if not isinstance(schema, dict):
        raise FormatError(f"{whole}must be an object or true")
    dialect = schema.get("$schema")
    try:
        for path, part in document_parts(schema, root).items():
            prepare(path, part, dialect if isinstance(dialect, str) else "")
        by_path = document_parts(schema, root)
    except RecursionError as error:
        raise FormatError(f"{whole}is nested too deeply") from error
    check_ids(by_path, root)
    check_targets(schema, by_path, root)
    check_references(by_path, root)
    every = list(by_path.items())
    _check_patterns(every)
    # Parts of `allOf` are merged, and so are their numbers.
    merges = any("allOf" in part or ("$ref" in part and len(part) > 1) for _, part in every)
    merges_numbers = merges or any(_merges_alternatives(part) for _, part in every)
    _check_property_patterns(every, merges_numbers)
    check_merged_patterns(schema, by_path)
    check_names(every, merges)
    _check_multiples(every, merges_numbers)
    _check_ranges(every, merges_numbers)
    return schema


def to_definition(schema: Mapping[str, Any], reason: str = "") -> str:
    """The grammar of a schema; with a `reason`, of what is left of one that is refused for it."""
    text = json.dumps(written(schema, reason), ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text, overrides=FORM)  # type: ignore[arg-type]


def json_terminal(schema: Mapping[str, Any]) -> str:
    """The schema in a grammar in Lark's syntax."""
    return f"%json {json.dumps({**written(schema), OPTIONS: FORM}, ensure_ascii=False)}"


def num_schema_quantifiers(schema: Mapping[str, Any]) -> int:
    """How many parts of all patterns may repeat or be absent."""
    return sum(number for number, _, _ in _quantifiers(document_parts(schema, "#").items()))


def _merges_alternatives(part: Mapping[str, Any]) -> bool:
    """Whether each alternative is merged with what is beside it, and both may have numbers."""
    if len(_MERGED & part.keys()) < 2:
        return False
    options = [part.get(keyword) for keyword in _ALTERNATIVES]
    listed = [one for several in options if isinstance(several, list) for one in several]
    return any(isinstance(one, dict) and not _MERGED.isdisjoint(one) for one in listed)


def _check_patterns(found: _Parts) -> None:
    quantifiers = list(_quantifiers(found))
    if sum(number for number, _, _ in quantifiers) > MAX_QUANTIFIERS:
        _, keyword, path = max(quantifiers)
        raise refused(
            keyword,
            path,
            f"has too many quantifiers: the patterns of a schema may have {MAX_QUANTIFIERS}",
        )


def _check_property_patterns(found: _Parts, merges: bool) -> None:
    patterns = [(len(_texts(part.get("patternProperties"))), path) for path, part in found]
    numbers = [number for number, _ in patterns]
    num_pairs = sum(numbers) ** 2 if merges else sum(number**2 for number in numbers)
    if num_pairs > _MAX_PROPERTY_PATTERNS**2:
        raise refused(
            "patternProperties",
            max(patterns)[1],
            f"has too many patterns: an object may have {_MAX_PROPERTY_PATTERNS}, fewer with "
            "others in the schema, and all objects together where schemas are merged",
        )


def _quantifiers(found: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[int, str, str]]:
    """Of each pattern, with its keyword and place."""
    for path, part in found:
        for keyword in ("pattern", "patternProperties"):
            for pattern in _texts(part.get(keyword)):
                yield num_quantifiers(pattern), keyword, path


def _texts(value: Any) -> list[str]:
    """A pattern, or those of `patternProperties`."""
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, dict) else []


def _check_multiples(found: _Parts, merges: bool) -> None:
    multiples = [
        (_digits(part["multipleOf"]), path)
        for path, part in found
        if is_number(part.get("multipleOf"))
    ]
    numbers = [number for number, _ in multiples]
    if numbers and (prod(numbers) if merges else sum(numbers)) > _MAX_REMAINDERS:
        raise refused(
            "multipleOf",
            max(multiples)[1],
            "is too large: the numbers of a schema, without their decimal points, may add up to "
            f"{_MAX_REMAINDERS}, and their product where schemas are merged",
        )


def _digits(number: float) -> int:
    """The digits of a number, without leading and trailing zeros."""
    digits = Decimal(str(number)).as_tuple().digits
    return int("".join(map(str, digits)).strip("0") or "1")


def _check_ranges(found: _Parts, merges: bool) -> None:
    ranges = [(path, _Range(part)) for path, part in found]
    if merges:
        ranges += [(found[0][0], _Range.merged(part for _, part in found))]
    for path, bounds in ranges:
        if keyword := bounds.misread():
            raise refused(
                keyword,
                path,
                "is not supported with a whole number and another bound less than 1 away",
            )


class _Range:
    """The bounds of numbers in one schema."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        self._bounds = {
            keyword: [part[keyword]] if is_number(part.get(keyword)) else []
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

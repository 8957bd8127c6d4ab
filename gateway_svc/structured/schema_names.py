"""Names of properties that the library does not follow: where none is left behind a comma, which
ends in an error, and where the same one may come twice."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from gateway_svc.structured.schema_parts import is_number, refused

# One token per byte.
_BYTES: Final = LLTokenizer("byte")
# Of the processor, for all objects of a schema: a fast machine compiles 400 meanwhile.
_MAX_S: Final = 0.25
_QUIET: Final = 0


def check_names(found: list[tuple[str, dict[str, Any]]], merges: bool) -> None:
    """FormatError at an object whose patterns leave no name beside those that it lists, or that
    needs several others. `found` are all schemas with their places; where they are merged, an
    object may have the names of all."""
    together = {name for _, part in found for name in _listed(part)} if merges else set()
    ends_s = time.thread_time() + _MAX_S
    for path, part in found:
        names = {*_listed(part)}
        _check_number(path, part, len(together or names))
        patterns = _possible_patterns(part)
        if not (names and patterns) or part.get("additionalProperties") is not False:
            continue
        if time.thread_time() > ends_s:
            raise refused("patternProperties", path, "is one of too many beside other properties")
        if not _leave_a_name(patterns, names):
            raise refused(
                "patternProperties",
                path,
                "matches no other names than those of properties and required; write its schemas "
                "to properties",
            )


def _possible_patterns(part: Mapping[str, Any]) -> list[str]:
    patterns = part.get("patternProperties")
    if not isinstance(patterns, dict):
        return []
    return [pattern for pattern, schema in patterns.items() if schema is not False]


def _listed(part: Mapping[str, Any]) -> Iterator[str]:
    properties, required = part.get("properties"), part.get("required")
    if isinstance(properties, dict):
        yield from properties
    if isinstance(required, list):
        yield from (name for name in required if isinstance(name, str))


def _check_number(path: str, part: Mapping[str, Any], num_names: int) -> None:
    """The names of other properties are not compared with each other."""
    number, kind = part.get("minProperties", 0), part.get("type", "object")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    if is_object and is_number(number) and number > num_names + 1:
        raise refused(
            "minProperties",
            path,
            f"is {number}, which can be followed up to {num_names + 1}, one more than the names of "
            "properties and required; list more of them there",
        )


def _leave_a_name(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a name beside these matches a pattern."""
    others = {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": dict.fromkeys(patterns, True),
        "additionalProperties": False,
    }
    definition = LLMatcher.grammar_from_json_schema(
        json.dumps(others, ensure_ascii=False), overrides={"whitespace_flexible": False}
    )
    matcher = LLMatcher(_BYTES, definition, log_level=_QUIET)
    # What is refused for another reason is named later.
    return matcher.is_error() or matcher.compute_ff_bytes() != b"{}"

"""Names of properties that the library does not follow: it writes a comma where no name is left."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from gateway_svc.structured.schema_parts import refused

# One token per byte.
_BYTES: Final = LLTokenizer("byte")
# Of the processor, for all objects of a schema: a fast machine compiles 400 meanwhile.
_MAX_S: Final = 0.25
_QUIET: Final = 0


def check_names(found: list[tuple[str, dict[str, Any]]]) -> None:
    """FormatError at an object whose patterns leave no name beside those that it lists. `found` are
    all schemas with their places."""
    ends_s = time.thread_time() + _MAX_S
    for path, part in found:
        names = {*_listed(part)}
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

"""Finds the keyword of a schema that the grammar library refuses."""

import copy
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from gateway_svc.structured.schema_parts import SCHEMAS, SCHEMAS_BY_NAME, Searched, child, parts
from quire.service.grammars import summary

# The reason why a schema is refused; None if it is served.
Refusal = Callable[[dict[str, Any]], str | None]
# Keys and indices that lead to a schema, and the keyword to remove from it.
_Place = tuple[tuple[str | int, ...], str]

# Of the processor, for compiling parts of the schema.
_MAX_SEARCH_S: Final = 0.2
_UNKNOWN: Final = re.compile(r"Unimplemented keys: (\[.*?\])")
_DEFINITIONS: Final = ("$defs", "definitions")
# Removed last: without them a schema has another meaning altogether.
_LAST: Final = ("type", "properties", *_DEFINITIONS)
# Like schemas, removed behind the constraints of texts and numbers.
_STRUCTURE: Final = ("type", "required", "$ref", "enum", "const")
# Removed first: what is too large is so by them.
_SIZES: Final = frozenset(
    f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Properties")
)
_TOO_LARGE: Final = (
    "its regular expressions, with what they repeat or leave out, are too large; use fewer "
    "quantifiers or shorter ones"
)
# For the library's texts, by their beginnings.
_WORDS: Final = {
    "recursion limit exceeded": "is nested too deeply",
    "NoExtensionBias": "it matches no text, or refers to itself without an end",
    "Unsatisfiable schema: Regex is empty": "it matches no text",
    "oneOf constraints are not supported": (
        "its options do not exclude each other by types or constants, as they have to; use anyOf"
    ),
    "Failed to generate regex for integer range": "a bound of 19 digits needs the other bound, too",
    "Failed to generate regex for float range": "a bound of 19 digits needs the other bound, too",
    "lexer error: too many expressions": _TOO_LARGE,
    "lexer precomputation failed": _TOO_LARGE,
    "initial lexer configuration (grammar) too big": _TOO_LARGE,
    "Unsatisfiable schema: ": "nothing follows it: ",
}
_MAX_CHARACTERS: Final = 300


def explain(reason: str, schema: dict[str, Any], refusal: Refusal, root: str = "#") -> str:
    """An error of the library, with the keyword that it is about and its place. `root` is that of
    the schema within a format."""
    try:
        found = _keyword_at_fault(reason, schema, refusal)
    except RecursionError:
        found = None
    shown = shown_reason(reason)
    if found is None:
        whole = "" if root == "#" else f"the schema at {root} "
        return f"{whole}is refused: {shown}; its largest part is {largest_part(schema, root)}"
    path, keyword = found
    named = f"the keyword {keyword} at {_pointer(root, path)}"
    if _UNKNOWN.match(reason):
        return f"{named} is not supported; remove it"
    return f"{named} is refused: {shown}; change or remove it"


def largest_part(schema: dict[str, Any], root: str) -> str:
    """The keyword that has most values, with its place."""
    sizes = [
        (len(value), f"the keyword {keyword} at {path}")
        for path, part in parts(schema, root, Searched())
        for keyword, value in part.items()
        if isinstance(value, dict | list)
    ]
    return max(sizes, default=(0, f"the schema at {root}"))[1]


def shown_reason(reason: str) -> str:
    """An error of the library in words."""
    for beginning, words in _WORDS.items():
        if reason.startswith(beginning):
            rest = summary(reason).removeprefix(beginning)
            return f"{words}{rest:.{_MAX_CHARACTERS}}" if words.endswith(" ") else words
    # An expression is known to its client.
    shown = summary(reason)
    shown = shown.rpartition("(in regex): ")[2] or shown
    return f"{shown:.{_MAX_CHARACTERS}}"


def _keyword_at_fault(reason: str, schema: dict[str, Any], refusal: Refusal) -> _Place | None:
    """The keyword without which the error is another one, or none.

    Keywords are removed one after another, those of sizes first, then those of texts and numbers,
    and the innermost first, until nothing is left; a binary search finds the one that ends the
    error. An option that allows everything, as nothing is left of it, would hide what is refused
    in another one. None if there is no time to find it.
    """
    started_s = time.thread_time()
    places = sorted(_removals(schema, ()), key=lambda place: _phase(place[1]))
    low, high = 0, len(places)
    while high - low > 1:
        if time.thread_time() - started_s > _MAX_SEARCH_S:
            return None
        middle = (low + high) // 2
        found = refusal(_without(schema, places[:middle]))
        if found is not None and _is_same(reason, found):
            low = middle
        else:
            high = middle
    return places[low] if places else None


def _phase(keyword: str) -> int:
    if keyword in _SIZES:
        return 0
    return 2 if keyword in _STRUCTURE or keyword in SCHEMAS or keyword in SCHEMAS_BY_NAME else 1


def _is_same(reason: str, other: str) -> bool:
    """Whether two errors of the library are of one kind: they differ at most in values."""
    unknown = _UNKNOWN.match(reason)
    if unknown:
        others = _UNKNOWN.match(other)
        return others is not None and json.loads(unknown[1])[0] in json.loads(others[1])
    return _kind(reason) == _kind(other)


def _kind(reason: str) -> str:
    return re.split(r"""[\d"'(/\[\n]""", reason, maxsplit=1)[0]


def _removals(schema: Any, path: tuple[str | int, ...]) -> Iterator[_Place]:
    """The keywords of a schema and of those within it, in the order of their removal: what
    references lead to first, so that they lead to something as long as they are there."""
    if isinstance(schema, list):
        for at, item in enumerate(schema):
            yield from _removals(item, (*path, at))
    if not isinstance(schema, dict):
        return
    keywords = sorted(schema, key=lambda keyword: keyword not in _DEFINITIONS)
    for keyword in keywords:
        value = schema[keyword]
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield from _removals(part, (*path, keyword, name))
        elif keyword in SCHEMAS:
            yield from _removals(value, (*path, keyword))
    yield from ((path, keyword) for keyword in sorted(schema, key=_order))


def _order(keyword: str) -> int:
    """Names are listed or refused, depending on what is beside them: they are removed first."""
    return 0 if keyword == "propertyNames" else 2 if keyword in _LAST else 1


def _without(schema: dict[str, Any], removed: Sequence[_Place]) -> dict[str, Any]:
    rest = copy.deepcopy(schema)
    for path, keyword in removed:
        part: Any = rest
        for key in path:
            part = part[key]
        del part[keyword]
    return rest


def _pointer(root: str, path: tuple[str | int, ...]) -> str:
    pointer = root
    for key in path:
        pointer = child(pointer, str(key))
    return pointer

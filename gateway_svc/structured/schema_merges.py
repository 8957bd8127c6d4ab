"""How many patterns of a schema are merged into one, which the library does not bound. Pure.

The states of one automaton for n expressions that all have to match are sets of theirs: with 24 of
them the library takes gigabytes before its own limit ends the work.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.schema_parts import (
    SCHEMAS,
    SCHEMAS_BY_NAME,
    local_pointer,
    refused,
    resolved,
)

# Compiling this many takes up to 0.05 s, three more ten times as long.
MAX_MERGED: Final = 10
# What references lead to is found after a few rounds.
_MAX_ROUNDS: Final = 20
# Numbers of all schemas together, each time that they are counted: a tenth of a second of work.
_MAX_COUNTED: Final = 2**17
_ALTERNATIVES: Final = ("anyOf", "oneOf")
# Keys of the counts of one schema beside the names of properties, which begin with a slash: of the
# value itself, and of properties without a name or of items.
_OWN: Final = ""
_OTHERS: Final = "*"
_Counts = dict[str, int]


def check_merged_patterns(schema: Any, found: Mapping[str, dict[str, Any]]) -> None:
    """FormatError at a schema whose value has to match too many patterns and formats at once.
    `found` are the schemas of the document by their places."""
    merges = _Merges(schema, found.values())
    order = merges.order(schema)
    for _ in range(_MAX_ROUNDS):
        if not merges.count(order):
            break
    for path, part in found.items():
        if merges.most(part) > MAX_MERGED:
            keyword = next((key for key in ("allOf", "$ref") if key in part), "pattern")
            raise refused(
                keyword,
                path,
                f"merges too many patterns and formats: a value may have {MAX_MERGED}",
            )


class _Merges:
    """For each schema, how many patterns and formats its value has, and each of its properties:
    the most at any place within them. Numbers end above the limit."""

    def __init__(self, schema: Any, found: Iterable[dict[str, Any]]) -> None:
        self._schema = schema
        # What a reference by an address may lead to.
        with_ids = [part for part in found if "$id" in part or "id" in part]
        self._addressed: dict[str, Any] = {"anyOf": with_ids}
        self._counts: dict[int, _Counts] = {}
        self._most: dict[int, int] = {}
        self._num_counted = 0

    def order(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """All schemas, each behind those that it consists of, unless they refer to each other."""
        ordered: list[dict[str, Any]] = []
        seen = {id(schema)}
        # Without recursion: references may form a chain of thousands.
        waiting = [(schema, self._inner(schema))]
        while waiting:
            part, inner = waiting[-1]
            following = next((one for _, one in inner if id(one) not in seen), None)
            if following is None:
                waiting.pop()
                ordered.append(part)
            else:
                seen.add(id(following))
                waiting.append((following, self._inner(following)))
        return ordered

    def count(self, ordered: list[dict[str, Any]]) -> bool:
        """Count again; whether anything has changed. FormatError if that takes too long."""
        changed = False
        for part in ordered:
            counts = self._counts_of(part)
            # A reference alone shares what it leads to.
            self._num_counted += 1 if len(part) == 1 and "$ref" in part else len(counts)
            if self._num_counted > _MAX_COUNTED:
                raise FormatError("merges too many properties that have patterns or formats")
            changed |= counts != self._counts.get(id(part))
            self._counts[id(part)], self._most[id(part)] = counts, _most(counts)
        return changed

    def most(self, part: dict[str, Any]) -> int:
        return self._most.get(id(part), 0)

    def _counts_of(self, part: dict[str, Any]) -> _Counts:
        if len(part) == 1 and "$ref" in part:
            return self._counts.get(next((id(inner) for _, inner in self._inner(part)), 0), {})
        counts = {_OWN: ("pattern" in part) + ("format" in part)}
        # Of alternatives only one is followed, and a property has one name.
        alternatives: dict[str, _Counts] = {}
        for keyword, inner in self._inner(part):
            if keyword in ("allOf", "$ref"):
                _add(counts, self._counts.get(id(inner), {}))
            elif keyword in _ALTERNATIVES:
                _raise(alternatives.setdefault(keyword, {}), self._counts.get(id(inner), {}))
            else:
                _raise(alternatives.setdefault("", {}), {keyword: self.most(inner)})
        for several in alternatives.values():
            _add(counts, several)
        return {key: value for key, value in counts.items() if value}

    def _inner(self, part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The schemas of a schema, each with the keyword whose schemas describe the same value, or
        with its key in the counts."""
        pointer = local_pointer(part)
        if pointer is not None:
            target = resolved(self._schema, pointer)
            if isinstance(target, dict):
                yield "$ref", target
        elif "$ref" in part:
            yield "$ref", self._addressed
        for keyword, value in part.items():
            if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
                is_named = keyword == "properties"
                for name, inner in value.items():
                    if isinstance(inner, dict):
                        yield f"/{name}" if is_named else _OTHERS, inner
            elif keyword in SCHEMAS:
                same_value = keyword == "allOf" or keyword in _ALTERNATIVES
                for inner in value if isinstance(value, list) else [value]:
                    if isinstance(inner, dict):
                        yield keyword if same_value else _OTHERS, inner


def _most(counts: Mapping[str, int]) -> int:
    """Of the value, or of a property."""
    named = max((value for key, value in counts.items() if key.startswith("/")), default=0)
    return max(counts.get(_OWN, 0), named + counts.get(_OTHERS, 0))


def _add(counts: _Counts, more: Mapping[str, int]) -> None:
    for key, value in more.items():
        counts[key] = min(counts.get(key, 0) + value, MAX_MERGED + 1)


def _raise(counts: _Counts, others: Mapping[str, int]) -> None:
    for key, value in others.items():
        counts[key] = max(counts.get(key, 0), value)

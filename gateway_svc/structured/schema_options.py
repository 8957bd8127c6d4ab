"""Whether the options of a `oneOf` exclude each other. Pure.

The library compares options that are written in place; those behind references, and most numbers,
it takes for overlapping. Facts here are about more values than a schema allows, never about fewer:
what excludes each other by them does.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from gateway_svc.structured.schema_parts import is_number, local_pointer, resolved

_KINDS: Final = frozenset(("null", "boolean", "number", "string", "array", "object"))
# References and `allOf` within each other.
_MAX_DEPTH: Final = 8
# Of one value.
_MAX_PARTS: Final = 32
# Options may differ in properties of properties.
_MAX_LEVELS: Final = 3
# Of an enumeration; others are compared by their types.
_MAX_VALUES: Final = 1000
# That one schema requires.
_MAX_NAMES: Final = 100
# Of all options of a document, 5 to 20 µs each.
_MAX_COMPARED: Final = 5000
_NOTHING: Final[dict[str, Any]] = {"enum": []}
# Schemas that all describe one value.
_Parts = Sequence[Mapping[str, Any]]
_Values = frozenset[tuple[str, Any]]


class ExclusiveOptions:
    """Compares the options of one document, up to a limit of work."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._num_compared = 0
        # By the ids of schemas.
        self._found: dict[tuple[int, int], _Parts] = {}
        self._values: dict[int, _Values | None] = {}
        self._kinds: dict[int, frozenset[str]] = {}

    def exclude_each_other(self, options: Sequence[Any]) -> bool:
        """Whether each value follows one of the options at most; False also if that is not
        known."""
        found = [self._parts(option, _MAX_DEPTH) for option in options]
        return self._have_constant(found) or all(
            self._are_disjoint(one, other, _MAX_LEVELS) for one, other in combinations(found, 2)
        )

    def _have_constant(self, options: Sequence[_Parts]) -> bool:
        """Whether all are objects that require one property, with other values in each: found in
        one round, however many there are."""
        if not options or any(self._all_kinds(option) != {"object"} for option in options):
            return False
        for name in sorted(set.intersection(*map(_required, options))):
            self._num_compared += len(options)
            if self._num_compared > _MAX_COMPARED:
                return False
            values = [self._all_values(self._property(option, name)) for option in options]
            known = [one for one in values if one is not None]
            if len(known) == len(options) and len(frozenset().union(*known)) == sum(
                map(len, known)
            ):
                return True
        return False

    def _are_disjoint(self, one: _Parts, other: _Parts, levels: int) -> bool:
        self._num_compared += 1
        if self._num_compared > _MAX_COMPARED:
            return False
        kinds = self._all_kinds(one) & self._all_kinds(other)
        if not kinds:
            return True
        values, others = self._all_values(one), self._all_values(other)
        if values is not None and others is not None:
            return values.isdisjoint(others)
        if kinds != {"object"} or not levels:
            return False
        # An object of both has what either requires.
        return any(
            _forbid(one, name)
            or _forbid(other, name)
            or self._are_disjoint(
                self._property(one, name), self._property(other, name), levels - 1
            )
            for name in sorted(_required(one) | _required(other))
        )

    def _parts(self, option: Any, depth: int) -> _Parts:
        """The schema with those that its references and `allOf` apply to the same value."""
        if not isinstance(option, dict):
            return [] if option is True else [_NOTHING]
        if "$ref" in option:
            # Older versions ignore what is beside it.
            pointer = local_pointer(option)
            target = None if pointer is None else resolved(self._schema, pointer)
            return self._parts(target, depth - 1) if depth and isinstance(target, dict) else []
        key = id(option), depth
        if key not in self._found:
            self._found[key] = self._in_place(option, depth)
        return self._found[key]

    def _in_place(self, option: dict[str, Any], depth: int) -> _Parts:
        found: list[Mapping[str, Any]] = [option]
        several = option.get("allOf")
        for inner in several[:_MAX_PARTS] if depth and isinstance(several, list) else ():
            if len(found) < _MAX_PARTS:
                found += self._parts(inner, depth - 1)
        return found[:_MAX_PARTS]

    def _property(self, parts: _Parts, name: str) -> _Parts:
        found: list[Mapping[str, Any]] = []
        for part in parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                found += self._parts(properties[name], _MAX_DEPTH)
        return found[:_MAX_PARTS]

    def _all_kinds(self, parts: _Parts) -> frozenset[str]:
        """The types that a value may have."""
        kinds = _KINDS
        for part in parts:
            if id(part) not in self._kinds:
                self._kinds[id(part)] = _kinds(part)
            kinds &= self._kinds[id(part)]
        return kinds

    def _all_values(self, parts: _Parts) -> _Values | None:
        """All values that are possible; None if these are not few."""
        for part in parts:
            if id(part) not in self._values:
                self._values[id(part)] = _values(part)
            found = self._values[id(part)]
            if found is not None:
                return found
        return None


def _kinds(part: Mapping[str, Any]) -> frozenset[str]:
    """An integer is a number."""
    kinds = _KINDS
    types = part.get("type")
    named = [types] if isinstance(types, str) else types
    if isinstance(named, list) and all(isinstance(one, str) for one in named):
        found = {"number" if one == "integer" else one for one in named}
        kinds &= found if found <= _KINDS else _KINDS
    listed = _listed(part)
    if listed is not None:
        kinds &= {_kind(value) for value in listed}
    return kinds


def _values(part: Mapping[str, Any]) -> _Values | None:
    listed = _listed(part)
    if listed is None or len(listed) > _MAX_VALUES:
        return None
    if any(isinstance(value, dict | list) for value in listed):
        return None
    # 1 is 1.0, and True is neither.
    return frozenset((_kind(value), value) for value in listed)


def _listed(part: Mapping[str, Any]) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    listed = part.get("enum")
    return listed if isinstance(listed, list) else None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if is_number(value):
        return "number"
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _required(parts: _Parts) -> set[str]:
    found: set[str] = set()
    for part in parts:
        names = part.get("required")
        if isinstance(names, list):
            found.update(name for name in names[:_MAX_NAMES] if isinstance(name, str))
    return found


def _forbid(parts: _Parts, name: str) -> bool:
    for part in parts:
        properties = part.get("properties", {})
        is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
        if is_closed and isinstance(properties, dict) and name not in properties:
            return True
    return False

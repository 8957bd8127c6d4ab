"""Schemas of arguments as grammars of calls have them: within others, and closed. Pure."""

from collections.abc import Mapping
from typing import Any

_COMBINING = frozenset({"allOf", "oneOf", "not", "if", "dependentSchemas"})
_SCHEMAS_BY_NAME = frozenset({"properties", "$defs", "definitions"})
_MAPPINGS = _SCHEMAS_BY_NAME | {"patternProperties"}
_DATA = frozenset({"const", "enum"})
_SCHEMAS = frozenset({"items", "prefixItems", "anyOf"})
_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})


def moved(schema: Any, place: str) -> Any:
    """The schema with references within itself, for this place in another one."""
    if isinstance(schema, list):
        return [moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPPINGS and isinstance(value, Mapping):
            result[keyword] = {name: moved(part, place) for name, part in value.items()}
        else:
            result[keyword] = value if keyword in _DATA else moved(value, place)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = place + reference[1:]
    return result


def closed(schema: Mapping[str, Any]) -> Any:
    """The schema without properties that it does not name, unless it says what these are: a model
    that is held to a schema would add some. All values follow the given schema; one in which
    several schemas apply to an object is left as it is."""
    return _without_others(schema) if _is_plain(schema) else schema


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if not isinstance(value, Mapping):
        return True
    if _COMBINING & set(value) or ("$ref" in value and "properties" in value):
        return False
    if "anyOf" in value and "properties" in value:
        return False
    return all(map(_is_plain, value.values()))


def _without_others(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_others(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            result[keyword] = {name: _without_others(part) for name, part in value.items()}
        else:
            result[keyword] = _without_others(value) if keyword in _SCHEMAS else value
    if isinstance(result.get("properties"), dict) and not _OTHERS & set(schema):
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str):
                result["properties"].setdefault(name, True)
        result["additionalProperties"] = False
    return result

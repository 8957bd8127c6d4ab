"""Writes keywords that the library does not follow as others of the same meaning. Pure.

Errors name the keywords of the client, so this is done last.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway_svc.structured.schema_options import ExclusiveOptions
from gateway_svc.structured.schema_parts import document_parts, local_pointer, resolved

# What copies of schemas may add to a document.
_MAX_ADDED_BYTES: Final = 2**16
_Part = dict[str, Any]


def written(schema: Mapping[str, Any], reason: str = "") -> _Part:
    """A schema that allows the same values, for the library. With a `reason` it is what is left of
    a refused schema, and whatever else would be refused here is left out."""
    # A copy, however deeply it is nested.
    changed: _Part = json.loads(json.dumps(schema))
    # Inner ones come first, so that their sizes are known.
    found = [*document_parts(changed, "#").values()][::-1]
    pointers = [local_pointer(part) or "" for part in found]
    if not any("/additionalProperties" in pointer for pointer in pointers):
        _name_properties(changed, found)
    # A reference to an option is a place below its keyword.
    if not any("/oneOf/" in pointer for pointer in pointers):
        _rename_options(changed, found)
    if reason:
        _leave_out(found, reason)
    return changed


def _leave_out(found: Iterable[_Part], reason: str) -> None:
    for part in found:
        if "oneOf" not in reason and "anyOf" not in part and "oneOf" in part:
            part["anyOf"] = part.pop("oneOf")
        if "propertyNames" not in reason:
            part.pop("propertyNames", None)


def _rename_options(schema: _Part, found: Iterable[_Part]) -> None:
    """Write `oneOf` as `anyOf` where the options exclude each other."""
    options = ExclusiveOptions(schema)
    for part in found:
        several = part.get("oneOf")
        if "anyOf" in part or not isinstance(several, list):
            continue
        if options.exclude_each_other(several):
            part["anyOf"] = part.pop("oneOf")


def _name_properties(schema: _Part, found: Iterable[_Part]) -> None:
    """Write names that are listed as properties, and allow no others."""
    num_left = _MAX_ADDED_BYTES
    for part in found:
        names = _listed_names(schema, part.get("propertyNames"))
        properties, rest = part.get("properties", {}), part.get("additionalProperties", {})
        if names is None or "patternProperties" in part or not isinstance(properties, dict):
            continue
        shown = json.dumps(rest)
        num_left -= (len(names) - 1) * len(shown)
        if num_left < 0 or '"$id"' in shown:
            return
        kept = {name: one if name in names else False for name, one in properties.items()}
        part["properties"] = kept | {name: rest for name in names if name not in kept}
        part["additionalProperties"] = False
        del part["propertyNames"]


def _listed_names(schema: _Part, names: Any) -> list[str] | None:
    """All names that are possible; None if these are not listed."""
    if isinstance(names, dict) and "$ref" in names and len(names) == 1:
        pointer = local_pointer(names)
        names = None if pointer is None else resolved(schema, pointer)
    if not isinstance(names, dict) or not names.keys() <= {"type", "enum", "const"}:
        return None
    if names.get("type", "string") != "string":
        return None
    listed = [names["const"]] if "const" in names else names.get("enum")
    if not isinstance(listed, list) or ("const" in names and "enum" in names):
        return None
    return [*dict.fromkeys(name for name in listed if isinstance(name, str))]

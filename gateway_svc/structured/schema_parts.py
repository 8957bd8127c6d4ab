"""The schemas within a JSON Schema, each with its place as a JSON pointer. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from gateway_svc.structured.errors import FormatError

# Keywords with schemas as the values of an object, and with a schema or a list of them. Values of
# others are no schemas, whatever they look like.
SCHEMAS_BY_NAME: Final = frozenset(
    (
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependencies"),
    )
)
SCHEMAS: Final = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"),
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    )
)

_VERSION_4: Final = re.compile(r"draft-0[34]\b")
# Of a list: no document has more items. Other spellings of a number, such as 00, are none.
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")
# Of all places of a schema, each of which has the names around it: a long one would take gigabytes.
_MAX_CHARACTERS: Final = 2**24


def is_version_4(dialect: str) -> bool:
    """Whether a `$schema` names version 4 or 3."""
    return bool(_VERSION_4.search(dialect))


def refused(keyword: str, path: str, reason: str) -> FormatError:
    return FormatError(f"the keyword {keyword} at {path} {reason}")


@dataclass
class Searched:
    """Places that were searched for schemas."""

    places: set[str] = field(default_factory=set)
    _num_characters: int = 0

    def add(self, path: str) -> None:
        """FormatError if all are too long together."""
        self.places.add(path)
        self._num_characters += len(path)
        if self._num_characters > _MAX_CHARACTERS:
            raise FormatError(
                f"has many schemas in one with a long name, at {path:.80}…; shorten it"
            )


def parts(schema: Any, path: str, searched: Searched) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas within a schema, itself first, each with its place. What is at the places
    `searched` is left out; those of this schema are added to them."""
    if path in searched.places:
        return
    searched.add(path)
    if isinstance(schema, list):
        for at, item in enumerate(schema):
            yield from parts(item, f"{path}/{at}", searched)
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in list(schema.items()):
        inner = child(path, keyword)
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield from parts(part, child(inner, name), searched)
        elif keyword in SCHEMAS:
            yield from parts(value, inner, searched)


def document_parts(schema: Mapping[str, Any], root: str) -> dict[str, dict[str, Any]]:
    """The schemas within a document, and those that its references lead to outside of keywords,
    such as `#/components/schemas/city`, by their places. `root` is that of the document."""
    searched = Searched()
    found = dict(parts(schema, root, searched))
    new = [*found.values()]
    while new:
        pointer = local_pointer(new.pop())
        if pointer is None:
            continue
        for path, part in parts(resolved(schema, pointer), f"{root}{pointer}", searched):
            found[path] = part
            new.append(part)
    return found


def local_pointer(part: dict[str, Any]) -> str | None:
    """The JSON pointer of a schema's reference within its document, as `child` writes it, so that
    each place has one; empty for the whole. None for an anchor."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not (reference == "" or reference.startswith("#")):
        return None
    pointer = unquote(reference.removeprefix("#"))
    if pointer and not pointer.startswith("/"):
        return None
    return "".join(child("", name) for name in _names(pointer))


def resolved(schema: Any, pointer: str) -> Any:
    """The value at a JSON pointer; None if there is none."""
    for key in _names(pointer):
        if isinstance(schema, dict) and key in schema:
            schema = schema[key]
        elif isinstance(schema, list) and _INDEX.fullmatch(key) and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema


def _names(pointer: str) -> list[str]:
    """The keys and indices that a JSON pointer consists of."""
    return [name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]


def child(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

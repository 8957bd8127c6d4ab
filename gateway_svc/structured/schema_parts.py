"""The schemas within a JSON Schema, each with its place as a JSON pointer. Pure."""

from collections.abc import Iterator
from typing import Any, Final

from gateway_svc.structured.errors import FormatError

SCHEMAS_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
# Keywords whose values are no schemas, whatever they look like.
VALUES: Final = frozenset({"enum", "const", "default", "examples"})


def refused(keyword: str, path: str, reason: str) -> FormatError:
    return FormatError(f"the keyword {keyword} at {path} {reason}")


def parts(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas within a schema, itself first, each with its place."""
    if isinstance(schema, list):
        for at, item in enumerate(schema):
            yield from parts(item, f"{path}/{at}")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in list(schema.items()):
        inner = child(path, keyword)
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield from parts(part, child(inner, name))
        elif keyword not in VALUES:
            yield from parts(value, inner)


def child(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

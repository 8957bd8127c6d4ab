"""References of a schema that are not followed or have no end, and names for them. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from gateway_svc.structured.schema_parts import (
    child,
    is_version_4,
    local_pointer,
    refused,
    resolved,
)

# Keywords whose schemas apply to the same value.
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
# Of documents without an `$id`.
_BASE: Final = "http://schema.invalid/"
_NAMES_OF_ROOT: Final = ("json-schema:/", "json-schema://", "json-schema:///")


def check_targets(
    schema: Mapping[str, Any], by_path: Mapping[str, dict[str, Any]], root: str
) -> None:
    """FormatError at a reference that the library may resolve to what is not among `by_path`, the
    parts of `schema` that are checked."""
    dialects = (part.get("$schema") for part in by_path.values())
    is_old = any(isinstance(one, str) and is_version_4(one) for one in dialects)
    keywords = ("$id", "id") if is_old else ("$id",)
    for path, part in by_path.items():
        reference = part.get("$ref")
        if not isinstance(reference, str):
            continue
        address, _, place = reference.partition("#")
        if address and place:
            reason = "which has an address and a place; use the place alone"
        elif place and not place.startswith("/"):
            reason = "an anchor, which is not followed; use a place, such as #/$defs/name"
        elif not address and not isinstance(resolved(schema, unquote(place)), dict | bool):
            reason = "where no schema is"
        elif not address and _has_inner_id(schema, path.removeprefix(root), keywords):
            reason = "within a schema that has an $id of its own; remove this $id"
        else:
            continue
        raise refused("$ref", path, f"is {reference:.80}, {reason}")


def _has_inner_id(schema: Mapping[str, Any], pointer: str, keywords: Iterable[str]) -> bool:
    """Whether the value at a place below the whole, or one around it, has an address of its own."""
    names = pointer.split("/")[1:]
    for end in range(len(names)):
        around = resolved(schema, "/" + "/".join(names[: end + 1]))
        ids = [around.get(keyword) for keyword in keywords] if isinstance(around, dict) else []
        if any(isinstance(one, str) and not one.startswith("#") for one in ids):
            return True
    return False


def check_references(by_path: Mapping[str, dict[str, Any]], root: str) -> None:
    """FormatError at a reference that applies itself to the same value, and so has no end. `root`
    is the place of the whole document."""
    checked: set[str] = set()
    for start in by_path:
        # Depth first, without recursion: references may form a chain of thousands.
        open_paths: dict[str, list[tuple[str, str]]] = {start: _applied(start, by_path, root)}
        while open_paths:
            path, applied = next(reversed(open_paths.items()))
            if not applied or path in checked:
                checked.add(path)
                del open_paths[path]
                continue
            referrer, target = applied.pop()
            if target in open_paths:
                raise refused(
                    "$ref", referrer, "leads back to itself without a value in between; remove it"
                )
            if target in by_path and target not in checked:
                open_paths[target] = _applied(target, by_path, root)


def check_ids(by_path: Mapping[str, dict[str, Any]], root: str) -> None:
    """FormatError for two schemas of one `$id`, of which the library takes the last one, even for
    the whole document."""
    own = by_path[root].get("$id")
    base = _address(_BASE, own, root) if isinstance(own, str) else _BASE
    known = {*_NAMES_OF_ROOT, urldefrag(base).url}
    for path, part in by_path.items():
        name = part.get("$id")
        # A name of a place, in older versions.
        is_anchor = isinstance(name, str) and name.startswith("#") and len(name) > 1
        if path == root or not isinstance(name, str) or is_anchor:
            continue
        resolved = urldefrag(_address(base, name, path)).url
        if resolved in known:
            raise refused("$id", path, "is that of another schema, too; use another one")
        known.add(resolved)


def _address(base: str, name: str, path: str) -> str:
    """The `$id` of the schema at `path` as an address."""
    try:
        return urljoin(base, name)
    except ValueError as error:
        raise refused("$id", path, f"is {name:.80}, which is no address: {error}") from error


def _applied(path: str, by_path: Mapping[str, dict[str, Any]], root: str) -> list[tuple[str, str]]:
    """The places of the schemas that apply to the same value as this one, each with the place of
    what applies it."""
    part = by_path[path]
    found = []
    pointer = local_pointer(part)
    if pointer is not None:
        found.append((path, f"{root}{pointer}"))
    for keyword in _IN_PLACE:
        options = part.get(keyword)
        if isinstance(options, list):
            inner = child(path, keyword)
            found += [(path, f"{inner}/{at}") for at in range(len(options))]
    return found

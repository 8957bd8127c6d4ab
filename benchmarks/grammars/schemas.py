"""JSON schemas of many kinds, drawn from a seed, for benchmarks and tests of structured output."""

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

_NAMES = (
    "id",
    "name",
    "age",
    "tags",
    "city",
    "value",
    "kind",
    "items",
    "note",
    "a b",
    "größe",
    "x",
)
_WORDS = ("red", "green", "blue", "on", "off", "N/A", "a b", 'say "hi"', "größe", "😀", "")
_PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^(red|green)+$",
    "^[0-9]{4}-[01][0-9]$",
    "^#[0-9a-fA-F]{6}$",
    "[0-9]{2}$",
    "^x.{0,5}y$",
    "^[äöü]{1,3}$",
)
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration")


def mixed_schemas(count: int, seed: int = 0) -> list[Schema]:
    """`count` schemas, kind after kind. Most of their strings and arrays are bounded, so that
    random output ends."""
    generator = random.Random(seed)
    kinds = tuple(_KINDS.values())
    return [kinds[at % len(kinds)](generator) for at in range(count)]


def kinds() -> Iterator[str]:
    """The names of the kinds, in the order of `mixed_schemas`."""
    yield from _KINDS


def _string(r: random.Random) -> Schema:
    least = r.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + r.randrange(1, 12)}


def _integer(r: random.Random) -> Schema:
    schema: Schema = {"type": "integer"}
    low = r.randrange(-1000, 1000)
    schema[r.choice(("minimum", "exclusiveMinimum"))] = low
    schema[r.choice(("maximum", "exclusiveMaximum"))] = low + r.randrange(2, 5000)
    return schema


def _number(r: random.Random) -> Schema:
    low = round(r.uniform(-100, 100), r.randrange(4))
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + r.choice((0.5, 1, 250.25))}


def _multiple(r: random.Random) -> Schema:
    return {"type": "integer", "multipleOf": r.choice((2, 3, 5, 10)), "minimum": 0, "maximum": 999}


def _pattern(r: random.Random) -> Schema:
    return {"type": "string", "pattern": r.choice(_PATTERNS)}


def _format(r: random.Random) -> Schema:
    return {"type": "string", "format": r.choice(_FORMATS)}


def _enum(r: random.Random) -> Schema:
    values: list[object] = list(r.sample(_WORDS, r.randrange(1, 5)))
    if r.random() < 0.4:
        values += [r.randrange(100), None, True, {"a": 1}, [1, "b"]][: r.randrange(1, 6)]
    return {"enum": values}


def _const(r: random.Random) -> Schema:
    return {"const": r.choice((1, "x", None, True, 2.5, ["a", 1], {"k": {"n": []}}))}


def _literal(r: random.Random) -> Schema:
    return {"type": r.choice(("boolean", "null"))}


def _nullable(r: random.Random) -> Schema:
    return {"type": [r.choice(("boolean", "integer")), "null"]}


_LEAVES = (
    _string,
    _integer,
    _number,
    _multiple,
    _pattern,
    _format,
    _enum,
    _const,
    _literal,
    _nullable,
)


def _leaf(r: random.Random) -> Schema:
    return r.choice(_LEAVES)(r)


def _object(r: random.Random, value: Callable[[random.Random], Schema] = _leaf) -> Schema:
    names = r.sample(_NAMES, r.randrange(1, 6))
    return {
        "type": "object",
        "properties": {name: value(r) for name in names},
        "required": [name for name in names if r.random() < 0.7],
        "additionalProperties": False,
    }


def _array(r: random.Random) -> Schema:
    least = r.randrange(3)
    return {
        "type": "array",
        "items": _leaf(r),
        "minItems": least,
        "maxItems": least + r.randrange(4),
    }


def _tuple(r: random.Random) -> Schema:
    places = [_leaf(r) for _ in range(r.randrange(1, 4))]
    least = r.randrange(len(places) + 1)
    return {"type": "array", "prefixItems": places, "items": False, "minItems": least}


def _any_of(r: random.Random) -> Schema:
    return {"anyOf": [r.choice((_leaf, _object, _array))(r) for _ in range(r.randrange(2, 5))]}


def _tagged_union(r: random.Random) -> Schema:
    """`oneOf` whose options exclude each other by a constant."""
    options = [_object(r) for _ in range(r.randrange(2, 4))]
    for at, option in enumerate(options):
        option["properties"] = {"type": {"const": f"option {at}"}, **option["properties"]}
        option["required"] = ["type", *option["required"]]
    return {"oneOf": options}


def _references(r: random.Random) -> Schema:
    return {
        "$defs": {"point": _object(r), "label": _string(r)},
        "type": "object",
        "properties": {
            "from": {"$ref": "#/$defs/point"},
            "to": {"$ref": "#/$defs/point"},
            "label": {"$ref": "#/$defs/label"},
        },
        "required": ["from", "label"],
        "additionalProperties": False,
    }


def _recursive(r: random.Random) -> Schema:
    node = _object(r)
    node["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _tree(r: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    return {
        "type": "object",
        "properties": {"value": _leaf(r), "children": children},
        "required": ["value"],
        "additionalProperties": False,
    }


def _all_of(r: random.Random) -> Schema:
    low = r.randrange(50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + r.randrange(1, 200)}]}


def _all_of_objects(r: random.Random) -> Schema:
    first = {"type": "object", "properties": {"p": _leaf(r)}, "required": ["p"]}
    second = {"type": "object", "properties": {"q": _leaf(r)}, "required": ["q"]}
    return {"allOf": [first, second], "additionalProperties": False} | {
        "properties": {"p": True, "q": True}
    }


def _map(r: random.Random) -> Schema:
    return {"type": "object", "additionalProperties": _leaf(r)}


def _pattern_properties(r: random.Random) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^[a-c]{1,3}$": _leaf(r), "^n_[0-9]$": _integer(r)},
        "additionalProperties": False,
    }


def _counted_properties(r: random.Random) -> Schema:
    return {**_map(r), "minProperties": 1, "maxProperties": r.randrange(1, 4)}


def _deep(r: random.Random) -> Schema:
    schema = _object(r)
    for level in range(r.randrange(4, 12)):
        schema = {
            "type": "object",
            "properties": {f"level{level}": schema, "flag": {"type": "boolean"}},
            "required": [f"level{level}"],
            "additionalProperties": False,
        }
    return schema


def _large(r: random.Random) -> Schema:
    properties = {f"field_{at}": _leaf(r) for at in range(r.randrange(20, 40))}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:10],
        "additionalProperties": False,
    }


def _documented(r: random.Random) -> Schema:
    """As pydantic writes it: titles, descriptions, defaults."""
    schema = _object(r)
    for name, value in schema["properties"].items():
        value |= {"title": name.title(), "description": f"The {name}.", "default": None}
    return {**schema, "title": "Model"}


def _nested_objects(r: random.Random) -> Schema:
    return _object(r, lambda inner: r.choice((_leaf, _object, _array))(inner))


def _unbounded(r: random.Random) -> Schema:
    return {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "number"}}}


# Keywords that grammars hardly express: a library refuses them, or ignores them at a price.
def _unique(r: random.Random) -> Schema:
    return {**_array(r), "uniqueItems": True}


def _not(r: random.Random) -> Schema:
    return {"type": "string", "maxLength": 2, "not": {"const": r.choice(_WORDS)}}


def _conditional(r: random.Random) -> Schema:
    return {
        **_object(r),
        "if": {"properties": {"kind": {"const": "on"}}},
        "then": {"required": ["id"]},
    }


def _contains(r: random.Random) -> Schema:
    return {"type": "array", "contains": _integer(r), "maxItems": 3, "items": _integer(r)}


def _dependent(r: random.Random) -> Schema:
    return {**_object(r), "dependentRequired": {r.choice(_NAMES): [r.choice(_NAMES)]}}


def _property_names(r: random.Random) -> Schema:
    return {
        "type": "object",
        "propertyNames": {"maxLength": 2},
        "additionalProperties": _integer(r),
        "maxProperties": 2,
    }


_KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "strings by length": _string,
    "integers in ranges": _integer,
    "numbers in ranges": _number,
    "multiples": _multiple,
    "patterns": _pattern,
    "formats": _format,
    "enumerations": _enum,
    "constants": _const,
    "nullable": _nullable,
    "objects": _object,
    "nested objects": _nested_objects,
    "documented objects": _documented,
    "arrays": _array,
    "tuples": _tuple,
    "anyOf": _any_of,
    "oneOf with a tag": _tagged_union,
    "references": _references,
    "recursive lists": _recursive,
    "recursive trees": _tree,
    "allOf": _all_of,
    "allOf of objects": _all_of_objects,
    "maps": _map,
    "patternProperties": _pattern_properties,
    "counted properties": _counted_properties,
    "deep nesting": _deep,
    "many properties": _large,
    "unbounded": _unbounded,
    "uniqueItems": _unique,
    "not": _not,
    "if and then": _conditional,
    "contains": _contains,
    "dependentRequired": _dependent,
    "propertyNames": _property_names,
}

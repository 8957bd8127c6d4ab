"""JSON schemas: what follows them is valid, and a refusal names a keyword and its place."""

import json
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import jsonschema
import pytest
from format_grammars import (
    FIELD,
    SIZE,
    TOKENIZER,
    accepts,
    definition_of,
    of_schema,
    random_text,
)

from gateway_svc.structured import schema_errors
from gateway_svc.structured.compiler import StructuredOutputCompiler
from gateway_svc.structured.patterns import of_schema as prepared_pattern
from gateway_svc.structured.schema_options import ExclusiveOptions
from gateway_svc.structured.schema_parts import document_parts
from quire.service.errors import RequestError

VERSION_7 = "http://json-schema.org/draft-07/schema#"
VERSION_2019 = "https://json-schema.org/draft/2019-09/schema"
VERSION_4 = "http://json-schema.org/draft-04/schema#"
NULL = {"type": "null"}
NUMBER = {"type": "number"}
# The library has no such number, and compiling the schema would end the process.
OUTSIDE = {"type": "integer", "minimum": -2e19, "maximum": -1e19}
URI = {"type": "string", "format": "uri"}
# Each is merged with the next one.
CHAIN_OF_URIS = {str(at): {**URI, "$ref": f"#/$defs/{at + 1}"} for at in range(11)} | {"11": URI}
# Counting what is merged would take seconds.
WIDE_MERGES = {
    "$defs": {"a": {"type": "object", "properties": {f"k{at}": URI for at in range(400)}}},
    "prefixItems": [{"$ref": "#/$defs/a", "x": 1}] * 2000,
}
# Places of parts would take gigabytes.
LONG_NAME = {"$defs": {"a" * 50_000: {"anyOf": [{}] * 15_000}}}
OBJECT = {"type": "object"}
CLOSED = {**OBJECT, "additionalProperties": False}
CATS = {**OBJECT, "properties": {"is": {"const": "cat"}}, "required": ["is"]}
DOGS = {**OBJECT, "properties": {"is": {"enum": ["dog"]}, "of": CATS}, "required": ["is"]}
CAT_OR_DOG = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
PETS = {"cat": CATS, "dog": DOGS, "pet": CAT_OR_DOG}
MERGED = "merges too many patterns and formats: a value may have 10"
# What is merged with the keywords beside it.
MERGING: tuple[Callable[[Any], dict[str, Any]], ...] = (
    lambda schema: {"allOf": [schema]},
    lambda schema: {"anyOf": [NULL, schema]},
    lambda schema: {"oneOf": [schema, NULL]},
    lambda schema: {"anyOf": [NULL, {"$ref": "#/$defs/a"}], "$defs": {"a": schema}},
)


@pytest.fixture(scope="module")
def compiler() -> StructuredOutputCompiler:
    return StructuredOutputCompiler(TOKENIZER, SIZE)


def with_a(schema: Any) -> dict[str, Any]:
    return {**OBJECT, "properties": {"a": schema}, "required": ["a"]}


def refusal(compiler: StructuredOutputCompiler, schema: Any) -> str:
    with pytest.raises(RequestError) as caught:
        definition_of(compiler, of_schema(schema))
    assert caught.value.code.name == "INVALID_ARGUMENT"
    return caught.value.message.removeprefix(f"{FIELD}.json_schema: ")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (
            {"$ref": "#/x/a", "x": {"a": {"$ref": "#/x/b"}, "b": {"$ref": "#/x/a"}}},
            "$ref at #/x/b leads back",
        ),
        ({"items": {"$id": "#", **NULL}}, "$id at #/items is that of another schema, too"),
        ({"$id": "http://a/b", "items": {"$id": "b", **NULL}}, "$id at #/items is that of another"),
        ({"prefixItems": [{"$id": "x"}, {"$id": "./x"}]}, "$id at #/prefixItems/1 is that of"),
        (
            {"$id": "http://[x", **OBJECT},
            "$id at # is http://[x, which is no address: Invalid IPv6 URL",
        ),
        ({"items": {"$id": "//[x"}}, "$id at #/items is //[x, which is no address"),
        ({"$ref": f"#/x/{'9' * 5000}", "x": [NULL]}, "$ref at # is #/x/9999"),
        ({"dependentRequired": {"items": ["a"]}}, "dependentRequired at # is not supported"),
        *(
            ({"$ref": f"{address}#/x", "$id": "http://a/b", "x": OUTSIDE}, "$ref at # is")
            for address in ("json-schema:///", "http://a/b", "b", "http://c/d")
        ),
        (
            {"items": {"$id": "c", "not": {"$ref": "#/x"}, "x": OUTSIDE}, "x": NULL},
            "$ref at #/items/not is #/x, within a schema that has an $id of its own",
        ),
        (
            {"$schema": VERSION_4, "items": {"id": "c", "$ref": "#/x", "x": OUTSIDE}, "x": NULL},
            "$ref at #/items is #/x, within",
        ),
        ({"$ref": "#/x/+0", "x": [OUTSIDE]}, "$ref at # is #/x/+0, where no schema is"),
        ({"$ref": "#/x/00", "x": [NULL]}, "$ref at # is #/x/00, where no schema is"),
        ({"$ref": "http://c/d", "contentSchema": {"$id": "http://c/d", **OUTSIDE}}, "$ref at #"),
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x"}}}, "$ref at # is #x, an anchor, which is"),
        ({"pattern": "a\\"}, "pattern at # ends in a backslash that escapes nothing: a\\; remove"),
        ({"patternProperties": {"\\": NULL}}, "patternProperties at # ends in a backslash"),
        ({"patternProperties": {"[&]": NULL, r"[\&]": NULL}}, "patternProperties at # has a pa"),
        (
            {"type": "integer", "minimum": 10**18},
            "minimum at # is refused: a bound of 19 digits ne",
        ),
        ({"type": "number", "maximum": -2e18}, "maximum at # is refused: a bound of 19 digits ne"),
        (
            {"oneOf": [{"type": "string"}, {"minLength": 2}]},
            "oneOf at # is refused: its options do not exclude each other by types or constants",
        ),
        ({"oneOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": CATS}}, "oneOf at # is refused"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf at # is refused"),
        ({"items": {"oneOf": [CATS, {"type": "object"}], "anyOf": [{}]}}, "oneOf at #/items"),
        (
            {"oneOf": [CATS, {"$ref": "#/$defs/dog"}], "$defs": {"dog": {**DOGS, "not": {}}}},
            "not at #/$defs/dog is not supported",
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "patternProperties": {"a": {}}},
            "propertyNames at # is",
        ),
        ({"propertyNames": {"pattern": "a"}, "type": "object"}, "propertyNames at # is not supp"),
        (
            {**OBJECT, "required": ["a"], "minProperties": 3},
            "minProperties at # is 3, which can be followed up to 2, one more than the names",
        ),
        ({"patternProperties": {"^a$": NULL}, **CLOSED, "minProperties": 2}, "minProperties at #"),
        ({"allOf": [{"required": ["a"]}, {"minProperties": 3}]}, "minProperties at #/allOf/1 is"),
        *(
            (
                {"patternProperties": {pattern: NULL, "^b$": False}, **CLOSED, **names},
                "patternProperties at # matches no other names than those of properties and requi",
            )
            for pattern, names in (
                ("^a$", {"required": ["a"]}),
                ("^é?$", {"properties": {"": NULL, "é": NULL}}),
                (r"[^\s\S]", {"properties": {"a": NULL}}),
            )
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"format": "x"}},
            "format at #/additionalProperties is refused: Unknown format: x",
        ),
        ({"allOf": [CATS], "unevaluatedProperties": False}, "unevaluatedProperties at # is not"),
        (
            {"type": "string", "pattern": f"^{'a?' * 999}$"},
            "pattern at # is refused: its regular expressions, with what they repeat or leave out",
        ),
        ({"$ref": "#"}, "$ref at # leads back to itself"),
        ({"anyOf": [{"$ref": "#"}, NULL]}, "$ref at #/anyOf/0 leads back"),
        (
            {
                "properties": {"x": {"$ref": "#/$defs/a~1b"}},
                "$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"allOf": [{"$ref": "#/$defs/a~1b"}]}},
            },
            "$ref at #/$defs/c/allOf/0 leads back",
        ),
        (
            {"$id": "http://a/b", "$ref": "http://a/b"},
            "$id at # is refused: it matches no text, or refers",
        ),
        ({"type": "string", "pattern": r"[^\s\S]"}, "pattern at # is refused: it matches no text"),
        ({"maxLength": 10**12, "type": "string"}, "maxLength at #"),
        (
            {"type": "string", "minLength": 5, "maxLength": 2},
            "minLength at # is refused: nothing follows it: minLength (5)",
        ),
        (
            {"type": "object", "properties": {"a": {"enum": []}, "b": {}}, "required": ["a"]},
            "enum at #/properties/a",
        ),
        ({"prefixItems": [{"pattern": "a"}, {"pattern": "("}]}, "pattern at #/prefixItems/1"),
        (
            {"anyOf": [{"enum": [1]}, {"type": "object", "properties": {"a": {"pattern": "("}}}]},
            "pattern at #/anyOf/1/properties/a is refused: regex parse error",
        ),
        ({"patternProperties": {"(?=a)": {}}}, "patternProperties at #"),
        ({"type": "object", "additionalProperties": False, "required": ["x"]}, "additionalProp"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"minimum": "x"}}}, "minimum at #/$defs/a"),
        ({"$schema": "nope"}, "$schema at #"),
        (OUTSIDE, "maximum at # is -1e+19; at least -9223372036854400000 can be followed"),
        ({"minimum": 1e30, "maximum": 1e30 + 5}, "minimum at # is 1e+30; at most 922337203685440"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "maximum at # is -9223"),
        ({"anyOf": [NULL, {"exclusiveMinimum": 10**19}]}, "exclusiveMinimum at #/anyOf/1 is 1000"),
        ({"exclusiveMaximum": -1e300}, "exclusiveMaximum at # is -1e+300"),
        ({"allOf": [{"type": "integer"}, OUTSIDE]}, "maximum at #/allOf/1 is"),
        ({"$ref": "#/foo/%62ar", "foo": {"bar": OUTSIDE}}, "maximum at #/foo/bar is"),
        ({"multipleOf": -2}, "multipleOf at # is -2"),
        *(
            ({"multipleOf": 251, **around({"multipleOf": 199})}, "multipleOf at # is too large")
            for around in MERGING
        ),
        *(
            ({"exclusiveMinimum": 1, **around({"maximum": 1.5})}, "exclusiveMinimum at # is not")
            for around in MERGING
        ),
        (
            {"properties": {"a": {"minimum": 1.5}}, "anyOf": [with_a({"exclusiveMaximum": 2})]},
            "exclusiveMaximum at # is not supported with a whole number and another bound",
        ),
        ({"items": [NULL]}, "items at # is a list; use prefixItems"),
        ({"type": "integer", "exclusiveMaximum": True}, "exclusiveMaximum at # is no number"),
        ({"const": {"a": [2**53 + 1]}}, "const at # has the number 9007199254740993"),
        ({"enum": [123456789.123456789]}, "enum at # has the number"),
        (
            {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
            "$ref at #/properties/a",
        ),
        ({"type": "array", "minItems": 10**5, "items": NULL}, "minItems at #"),
        (
            {"properties": {str(at): NULL for at in range(1000)}, "required": ["700"]},
            "properties at # has 700 optional properties in a row; at most 480",
        ),
        ({"allOf": [{"pattern": f"a.{{9}}{at}.*"} for at in range(18)]}, f"allOf at # {MERGED}"),
        ({"allOf": [{"properties": {"a": URI}}, {"items": URI}] * 11}, f"allOf at # {MERGED}"),
        ({"allOf": [{"anyOf": [NULL, URI]}] * 11}, f"allOf at # {MERGED}"),
        ({"$ref": "#/$defs/0", "$defs": CHAIN_OF_URIS}, f"$ref at # {MERGED}"),
        ({"allOf": [{"$ref": "c"}] * 11, "$defs": {"x": {"$id": "c", **URI}}}, "allOf at # merges"),
        (
            {"type": "object", "patternProperties": {f"^k{at}$": {} for at in range(101)}},
            "patternProperties at # has too many patterns: an object may have 100",
        ),
        (
            {"allOf": [{"patternProperties": {f"^k{at}$": {}}} for at in range(101)]},
            "patternProperties at #/allOf/",
        ),
    ],
)
def test_a_refused_schema_names_its_keyword(
    compiler: StructuredOutputCompiler, schema: Any, keyword: str
) -> None:
    assert refusal(compiler, schema).startswith(f"the keyword {keyword}")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("false", "is false, which no value satisfies"),
        ("null", "must be an object or true"),
        ('{"minimum": NaN}', "is not JSON: NaN"),
        ('{"exclusiveMinimum": 1e999}', "is not JSON: the number 1e999 is too large"),
        (f'{{"maximum": {10**400}}}', "is too large"),
        ('{"items": ' * 200 + "{}" + "}" * 200, "is nested too deeply"),
        (json.dumps(LONG_NAME), "has many schemas in one with a long name, at #/$defs/aaaa"),
        (json.dumps(WIDE_MERGES), "merges too many properties that have patterns or formats"),
        (r'{"const": "\ud800"}', "surrogate"),
        (r'{"properties": {"\udfff": {}}}', "surrogate"),
    ],
)
def test_what_is_no_schema_is_refused(
    compiler: StructuredOutputCompiler, schema: str, reason: str
) -> None:
    assert reason in refusal(compiler, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": NULL, "uniqueItems": False, "maxItems": 2},
        {"propertyNames": True, "unevaluatedProperties": {}, "unevaluatedItems": True, "const": 1},
        {"not": False, "dependentRequired": {}, "dependentSchemas": {}, "enum": [1, "a", None]},
        {"if": {"const": 1}, "enum": [1, 2]},
        {"then": False, "else": False, "minContains": 3, "maxContains": 0, "const": [1]},
        {"enum": [1, "a", None, {"b": [1]}, True, 1.5, "/", "\x7f"]},
        {"const": None},
        {"$id": "http://a/b", "$ref": "c", "$defs": {"x": {"$id": "c", "type": "null"}}},
        {"x-meta": {"items": [1], "pattern": 5, "multipleOf": -1}, "type": "null"},
        {"type": "object", "properties": {"a": NULL, "b": False}, "required": ["a"]},
        {
            "$schema": VERSION_4,
            "type": "integer",
            "minimum": 3,
            "maximum": 5,
            "exclusiveMaximum": True,
        },
        {"$schema": VERSION_7, "type": "array", "items": [NULL], "additionalItems": False},
        # Without a list of items it has no effect.
        {"type": "array", "prefixItems": [NULL, NULL], "additionalItems": False, "maxItems": 2},
        {
            "type": "object",
            "patternProperties": {'^[^"]$': NULL},
            "additionalProperties": False,
            "maxProperties": 1,
        },
        # Many patterns, but few of one value.
        {"allOf": [{"properties": {f"k{at}": URI}} for at in range(20)], "type": "object"},
        {"type": "object", "patternProperties": {f"^k{at}$": NULL for at in range(100)}},
        {"type": "string", "pattern": r"^[^\n\"]{2}$"},
        {"type": "string", "pattern": r"^[^\\]{2}$"},
        {"type": "string", "pattern": r'^[^<>:"/\\|?*]{1,3}$'},
        {"type": "string", "pattern": r"^[\x00-\x1f]$"},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 10**4},
        {"type": "number", "minimum": 123456789.123456789, "maximum": 123456789.2},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        *(
            {"type": kind, "minimum": -low, "exclusiveMaximum": high}
            for kind in ("integer", "number")
            for low, high in ((2e19, 5), (1e19, -(10**18)), (-3, 10**30), (1e300, 1e300))
        ),
        {"type": "integer", "minimum": -(10**30)},
        {"type": "integer", "minimum": 10**18 - 10**5, "exclusiveMaximum": 10**18},
        {"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 999},
        *(
            {"type": kind, "minimum": low, "maximum": low + 30_000}
            for kind in ("integer", "number")
            for low in (9_223_372_036_854_360_000, -9_223_372_036_854_390_000, 10**17 + 10**3 + 1)
        ),
        {"type": "integer", "exclusiveMinimum": -(2**63), "maximum": 1e19},
        {
            "$ref": "#/components/schemas/a~1b",
            "components": {
                "schemas": {
                    "a/b": {"items": {"$ref": "#/components/schemas/c"}, "type": "array"},
                    "c": {"type": "string", "pattern": '^[^"]$', "uniqueItems": False},
                }
            },
        },
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
        {"$ref": "#/$defs/pet", "$defs": PETS},
        {"oneOf": [{"$ref": "#/$defs/a"}, NULL], "$defs": {"a": {"enum": ["a", 1]}}},
        {
            "oneOf": [
                {"properties": {"a": {"const": at}}, "required": ["a"], **OBJECT} for at in (1, 2)
            ]
        },
        {"oneOf": [NULL, {"type": "array", "items": {"$ref": "#/oneOf/0"}, "maxItems": 2}]},
        {"propertyNames": {"type": "string", "description": "x"}, "maxProperties": 1, **OBJECT},
        {
            **OBJECT,
            "propertyNames": {"$ref": "#/$defs/names"},
            "properties": {"b": NULL, "x": {}},
            "additionalProperties": {"type": "boolean"},
            "minProperties": 1,
            "$defs": {"names": {"type": "string", "enum": ["a", "b"]}},
        },
        {**OBJECT, "properties": {"a": NULL}, "unevaluatedProperties": False},
        {**CLOSED, "patternProperties": {"^[ab]$": NULL}, "required": ["a"]},
        {**CLOSED, "patternProperties": {"^b$": False}, "properties": {"a": NULL}},
        {**OBJECT, "required": ["a"], "minProperties": 2, "maxProperties": 2},
        {"allOf": [{"required": ["a"], "maxProperties": 2}, {"minProperties": 2}], **OBJECT},
        {"type": "boolean", "minProperties": 5},
        {"type": "array", "prefixItems": [NULL], "unevaluatedItems": False},
        *(
            {
                "$schema": VERSION_2019,
                "type": "array",
                "items": [NULL],
                "unevaluatedItems": False,
                "maxItems": 3,
                **more,
            }
            for more in ({}, {"additionalItems": {"type": "boolean"}})
        ),
        {"type": "array", "items": NULL, "uniqueItems": True, "maxItems": 1},
        {"enum": ["a"], "format": "password"},
        # Numbers that nothing merges, with alternatives beside other keywords.
        {
            **OBJECT,
            "properties": {"a": {"exclusiveMinimum": 1, **NUMBER}, "b": {"maximum": 1.5, **NUMBER}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        {
            "title": "A",
            "default": None,
            "anyOf": [
                {"exclusiveMinimum": 1, "multipleOf": 199, **NUMBER},
                {"maximum": 0.5, "multipleOf": 251, **NUMBER},
                NULL,
            ],
            "type": ["number", "null"],
        },
    ],
)
def test_outputs_are_valid(compiler: StructuredOutputCompiler, schema: dict[str, Any]) -> None:
    definition = definition_of(compiler, of_schema(schema))
    validator = jsonschema.validators.validator_for(schema)(schema)
    texts = [random_text(definition, seed) for seed in range(20)]
    documents = [json.loads(text) for text in texts if text is not None]
    assert documents
    assert [one for one in documents if not validator.is_valid(one)] == []


@pytest.mark.parametrize(
    "pattern",
    [r'^[^"]$', r"^[^\\]$", r'^[^"\\\n]$', r"^[\x00-\x1f]$", r"^[^a]$", r"^.$", r"^[^]\"]$"],
)
def test_sets_of_characters_match_quotes_as_python_does(
    compiler: StructuredOutputCompiler, pattern: str
) -> None:
    definition = definition_of(compiler, of_schema({"type": "string", "pattern": pattern}))
    for character in ('"', "\\", "/", "\n", "\x01", "a", "é"):
        text = json.dumps(character, ensure_ascii=False)
        assert accepts(definition, text) == bool(re.search(pattern, character)), character


def test_only_sets_that_are_misread_change() -> None:
    kept = r"^[a-z\]]+\[[^\s][\w.]{2}(a|\\)[*--]$"
    assert prepared_pattern(kept) == kept.replace("--]", r"-\-]")
    assert prepared_pattern(r'\[[^"]') == r'\[[[^"]&&[^\x00]]'
    assert prepared_pattern(r"\P{Po}") == r"[\P{Po}&&[^\x00]]"
    # Without an end: the library refuses it.
    assert prepared_pattern("[^'\"](?:[^]") == "[^'\"](?:[^]"


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(
    "pattern",
    [
        "^[[:a]$",
        "^[[:alpha:]]{2}$",
        "^[a&&b]$",
        "^[+--]$",
        "^[--/]$",
        "^[a~~b-]$",
        "^[|||a]$",
        r"^[\[a&&[^b]]$",
        r"^[\^\-\]^-]$",
        r"^[]a[b]$",
        r"^[\x5b-\x5d&]$",
        r"^[\u005b-a]$",
        r"^[^[&&~-]$",
        r"^[^[\\\"]$",
        r"^[\b]$",
    ],
)
def test_sets_of_characters_have_no_operators(
    compiler: StructuredOutputCompiler, pattern: str
) -> None:
    definition = definition_of(compiler, of_schema({"type": "string", "pattern": pattern}))
    for text in [*map(chr, range(1, 127)), "a]]", "ab", "xy", "b]", "[]"]:
        shown = json.dumps(text, ensure_ascii=False)
        assert accepts(definition, shown) == bool(re.search(pattern, text)), text


def test_a_mark_beside_a_class_is_one_of_the_set(compiler: StructuredOutputCompiler) -> None:
    definition = definition_of(compiler, of_schema({"type": "string", "pattern": r"^[\w-.]$"}))
    assert [one for one in "a-.," if accepts(definition, f'"{one}"')] == ["a", "-", "."]


def test_a_part_with_two_places_is_changed_once(compiler: StructuredOutputCompiler) -> None:
    places = ("#/x~/0", "#/x~0/0", "#/x~/%30")
    schema = {"anyOf": [{"$ref": one} for one in places], "x~": [{"pattern": '^[^"]$'}]}
    assert accepts(definition_of(compiler, of_schema(schema)), '"a"')


def test_a_part_is_found_once_however_references_spell_its_place() -> None:
    part = {"properties": {str(at): {} for at in range(100)}}
    names = ["".join(pair) for pair in product(("~", "~0", "%7E", "%7e0"), repeat=2)]
    places = [
        *(f"#/$defs/{name}{end}" for name in names for end in ("", "/properties/5")),
        *(f"#/x/{'0' * zeros}{end}" for zeros in (1, 2, 9) for end in ("", "/properties/5")),
        *("#/x", "#/%78", "#x", "#y", "", "#"),
    ]
    schema = {
        "anyOf": [{"$ref": place} for place in places],
        "$defs": {"~~": part},
        "x": [json.loads(json.dumps(part))],
    }
    found = document_parts(schema, "#")
    assert len(found) == 1 + len(places) + 2 * (1 + 100)
    assert len({id(one) for one in found.values()}) == len(found)
    assert {"#/$defs/~0~0", "#/x/0/properties/5"} <= found.keys()


def test_the_search_for_a_keyword_ends(compiler: StructuredOutputCompiler) -> None:
    """In a large schema a few parts of it are compiled, not one for each keyword."""
    properties = {str(at): {"type": "string", "maxLength": at + 1} for at in range(400)}
    schema = {"type": "object", "properties": {**properties, "x": {"not": {}}}}
    assert refusal(compiler, schema) == (
        "the keyword not at #/properties/x is not supported; remove it"
    )


def test_a_search_without_time_names_the_largest_part(
    compiler: StructuredOutputCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_errors, "_MAX_SEARCH_S", -1)
    schema = {"properties": {"a": {"not": NULL, "enum": [1, 2, 3]}}, "required": ["a"]}
    assert "; its largest part is the keyword enum at #/properties/a" in refusal(compiler, schema)


def test_comparing_options_ends() -> None:
    """Those of one constant property in a round, all others up to a limit of pairs."""
    options = [
        {**OBJECT, "properties": {"a": {"const": at}}, "required": ["a"]} for at in range(150)
    ]
    assert ExclusiveOptions({}).exclude_each_other(options)
    closed = [{**OBJECT, "required": [str(at)], "additionalProperties": False} for at in range(150)]
    assert ExclusiveOptions({}).exclude_each_other(closed[:50])
    assert not ExclusiveOptions({}).exclude_each_other(closed)

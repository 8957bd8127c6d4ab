"""Grammars and structural tags: what they ask for is followed, or refused with its place."""

import json
from typing import Any

import pytest
from format_grammars import FIELD, SIZE, TOKENIZER, accepts, definition_of, random_text

from gateway_svc.structured.compiler import StructuredOutputCompiler
from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.lark import grammar_to_lark
from gateway_svc.structured.lark_source import read_lark
from quire.service.errors import RequestError
from quire.v1 import structured_output_pb2 as pb

SCHEMA = {"type": "json_schema", "json_schema": {"type": "null"}}
TAG = {"begin": "<a>", "content": SCHEMA, "end": "</a>"}
OPTIONAL = {"type": "or", "elements": [{"type": "regex", "pattern": "a"}, {"type": "any_text"}]}
SKIPPING = '%llguidance {"allow_initial_skip": true}\nstart: "a"\n%ignore / /'


@pytest.fixture(scope="module")
def compiler() -> StructuredOutputCompiler:
    return StructuredOutputCompiler(TOKENIZER, SIZE)


def tag(**fields: Any) -> pb.StructuredOutput:
    return pb.StructuredOutput(structural_tag=json.dumps(fields))


def grammar(text: str) -> pb.StructuredOutput:
    return pb.StructuredOutput(grammar=text)


def refusal(compiler: StructuredOutputCompiler, output: pb.StructuredOutput) -> str:
    with pytest.raises(RequestError) as caught:
        definition_of(compiler, output)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    return caught.value.message.removeprefix(f"{FIELD}.{output.WhichOneof('format')}: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: x\nx[temperature=0.5]: /a/", "has the attribute 'temperature' at the rule x"),
        ('start: x\nx[capture, suffix="]"]: /a/', "has the attribute 'capture' at the rule x"),
        ('%llguidance {"nope": 1}\nstart: "a"', "has the option 'nope' of %llguidance"),
        ('start: %json {"not": {}}', "the keyword not at %json[0] is not supported"),
        (
            'start: %json true %json {"items": {"$ref": "#/items"}}',
            "the keyword $ref at %json[1]/items leads back to itself",
        ),
        ('start: %json {"type": }', "%json at character 12 is not JSON"),
        (r'start: %json {"const": "\ud800"}', "%json at character 12 has half of a surrogate"),
        ('start: %json {"$id": "http://[x"}', "the keyword $id at %json[0] is http://[x"),
        ('start: "a', 'has a text or regular expression without an end: " at character 7'),
        ("start: start", "is refused: it matches no text"),
        (r"start: /[^\s\S]/", "is refused: it matches no text"),
    ],
)
def test_refused_grammars(compiler: StructuredOutputCompiler, text: str, reason: str) -> None:
    assert refusal(compiler, grammar(text)).startswith(reason)


def test_schemas_in_grammars_have_the_white_space_of_other_schemas(
    compiler: StructuredOutputCompiler,
) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": '^[^"]$'}}
    definition = definition_of(compiler, grammar(f"start: %json {json.dumps(schema)} // json"))
    assert accepts(definition, '["a", "b"]')
    assert not accepts(definition, '["a" ,"b"]')
    assert not accepts(definition, r'["\""]')


def test_attributes_that_are_served(compiler: StructuredOutputCompiler) -> None:
    text = '%llguidance {"no_forcing": true}\nstart: x y\nx[max_tokens=2]: /a*/\ny[stop=";"]: /b*/'
    definition = definition_of(compiler, grammar(text))
    assert {random_text(definition, seed) for seed in range(40)} >= {"b;", "aa;", "aab;"}
    assert accepts(definition_of(compiler, grammar(SKIPPING)), " a")


@pytest.mark.parametrize(
    "text",
    [
        f'A: "a"?\nstart:{" A" * 1100}',
        f'A: "a" |\nB: A\nstart:{" B" * 1100}',
        f'a: "a" |\nb: a a\nstart:{" b" * 1100}',
        f'A: "a"?\nB:{" A" * 1100}\nstart: B',
        "\n".join(['A0: "a"?', *(f"A{at + 1}: A{at} A{at}" for at in range(11)), 'start: A11 "b"']),
        "start:" + ' ["a"]' * 1100,
        "start:" + ' ("a"|)' * 1100,
        "start:" + ' ""' * 1100,
        "start:" + ' "a"~0..1' * 1100,
        'start: %json {"pattern": "' + "a?" * 600 + '"} /' + "b?" * 600 + "/",
    ],
    ids=range(10),
)
def test_what_may_be_absent_is_counted(compiler: StructuredOutputCompiler, text: str) -> None:
    assert "at most 1000 are allowed" in refusal(compiler, grammar(text))


def test_marks_in_texts_and_comments_are_not_counted() -> None:
    text = '?start: A "???" /\\?[*]/ // ??\n    | %json {"const": "*"}\nA[lazy]: "+" B+ # *\nB: "b"'
    assert read_lark(text).num_quantifiers.total() == 3


@pytest.mark.parametrize("num", [1, 3000])
def test_chains_of_terminals_are_counted_in_time(num: int) -> None:
    rules = [f"T{at}: T{at + 1}" for at in range(num)]
    text = "\n".join(["start: T0", *rules, f'T{num}: "a"?'])
    assert read_lark(text).num_quantifiers.total() == 1


@pytest.mark.parametrize("text", ['"' + r"\"" * 50_000, "/" + r"\/" * 50_000, "a[" * 50_000])
def test_unfinished_texts_are_refused_in_time(
    compiler: StructuredOutputCompiler, text: str
) -> None:
    refusal(compiler, grammar(f"start: {text}"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": SCHEMA, "foo": 1}, "has the unknown key 'foo' at #; there are format, type"),
        ({"type": "json", "format": SCHEMA}, "has the type 'json' at #; it is structural_tag"),
        ({}, "has no 'format' at #"),
        ({"format": {"type": "any_text", "excludes": []}}, "has the unknown key 'excludes' at"),
        ({"format": {**SCHEMA, "style": "json"}}, "has the unknown key 'style' at #/format;"),
        (
            {"format": {"type": "sequence", "elements": [SCHEMA, {"type": "regex"}]}},
            "has no 'pattern' at #/format/elements/1, which is needed",
        ),
        ({"format": {"type": "or", "elements": []}}, "has no elements at #/format/elements"),
        (
            {"format": {"type": "grammar", "grammar": SKIPPING}},
            "has the option allow_initial_skip of %llguidance, which has no effect where",
        ),
        ({"format": {"type": "const_string", "value": 1}}, "has a value of another type at #/form"),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{**TAG, "x": 1}]}},
            "has the unknown key 'x' at #/format/tags/0",
        ),
        (
            {"format": {"type": "triggered_tags", "triggers": ["!"], "tags": [TAG]}},
            "has a tag at #/format/tags/0 that begins with none of the triggers",
        ),
        (
            {
                "format": {
                    "type": "tags_with_separator",
                    "tags": [TAG],
                    "separator": "",
                    "at_least_one": "no",
                }
            },
            "has a value of another type at #/format/at_least_one: true or false is needed",
        ),
        (
            {"structures": [{"begin": "<", "end": ">", "scheme": {}}], "triggers": ["<"]},
            "has the u",
        ),
        (
            {"structures": [{"begin": "<", "end": ">", "schema": {"not": {}}}], "triggers": ["<"]},
            "the keyword not at #/structures/0/schema is not supported",
        ),
        (
            {"format": {"type": "json_schema", "json_schema": False}},
            "the schema at #/format/json_schema is false",
        ),
        (
            {"format": {"type": "tag", **TAG, "content": {"type": "regex", "pattern": "a(?=b)"}}},
            "is refused at #/format/content/pattern: regex parse error: error: look-around",
        ),
        (
            {"format": {"type": "regex", "pattern": "a\\"}},
            "ends in a backslash that escapes nothing; remove or double it, in the pattern at #",
        ),
        (
            {"format": {"type": "grammar", "grammar": 'start: x\nx[capture]: "a"'}},
            "has the attribute 'capture' at the rule x, which is not served",
        ),
        (
            {"format": {"type": "sequence", "elements": [OPTIONAL] * 1100}},
            "has 1100 quantifiers, 1 of them at #/format/elements/0; at most 1000",
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "regex", "pattern": "a?" * 300},
                        {"type": "grammar", "grammar": f"start: /{'b?' * 301}/"},
                        {"type": "json_schema", "json_schema": {"pattern": "c?" * 500}},
                    ],
                }
            },
            "has 1101 quantifiers, 500 of them at #/format/elements/2/json_schema; at most 1000",
        ),
    ],
)
def test_refused_tags(
    compiler: StructuredOutputCompiler, fields: dict[str, Any], reason: str
) -> None:
    assert refusal(compiler, tag(**fields)).startswith(reason)


def test_half_of_a_surrogate_pair_is_no_text_of_a_tag(compiler: StructuredOutputCompiler) -> None:
    text = r'{"format": {"type": "const_string", "value": "\ud800"}}'
    assert "surrogate" in refusal(compiler, pb.StructuredOutput(structural_tag=text))


def test_control_characters_in_texts_of_a_tag(compiler: StructuredOutputCompiler) -> None:
    text = "".join(map(chr, range(1, 0xA0)))
    definition = definition_of(compiler, tag(format={"type": "const_string", "value": text}))
    assert accepts(definition, text)


@pytest.mark.parametrize("depth", [127, 300, *range(975, 990)])
@pytest.mark.parametrize("is_tag", [False, True], ids=["grammar", "tag"])
def test_deep_schemas_are_refused(
    compiler: StructuredOutputCompiler, depth: int, is_tag: bool
) -> None:
    """By the library, and where Python's recursion ends in a part of the work."""
    schema = '{"items": ' * depth + "{}" + "}" * depth
    node = f'{{"type": "json_schema", "json_schema": {schema}}}'
    output = pb.StructuredOutput(structural_tag=f'{{"format": {node}}}')
    if not is_tag:
        output = grammar(f"start: %json {schema}")
    assert "is nested too deeply" in refusal(compiler, output)


@pytest.mark.parametrize("kind", ["json", "lark"])
def test_bounds_of_schemas_in_grammars_are_checked(
    compiler: StructuredOutputCompiler, kind: str
) -> None:
    """Of one that is compiled the process would end."""
    schema = '%json {"type": "integer", "minimum": -1e19, "maximum": -1e19}'
    text = schema if kind == "json" else f"%lark {{ start: {schema}\n}}"
    assert refusal(compiler, grammar(f"start: {text}")).startswith(
        "the keyword maximum at %json[0]"
    )


def test_bounds_of_schemas_in_tags_are_checked(compiler: StructuredOutputCompiler) -> None:
    schema = {"type": "integer", "exclusiveMinimum": -2e19, "exclusiveMaximum": -1e19}
    form = {"type": "json_schema", "json_schema": schema}
    reason = "the keyword exclusiveMaximum at #/format/json_schema is -1e+19"
    assert refusal(compiler, tag(format=form)).startswith(reason)
    structures = [{"begin": "<", "end": ">", "schema": schema}]
    reason = "the keyword exclusiveMaximum at #/structures/0/schema is -1e+19"
    assert refusal(compiler, tag(structures=structures, triggers=["<"])).startswith(reason)


def test_terminals_that_double_are_refused() -> None:
    """Compiling 300 of them took 1.8 s, and 3,000 held the whole process."""
    terminals = "".join(f"R{at}: R{at + 1} R{at + 1}\n" for at in range(30))
    with pytest.raises(FormatError, match="has the terminal R0, which is more than 100000 parts"):
        grammar_to_lark(f'start: R0\n{terminals}R30: "a"')


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a"' + "\n" * 100_000, 'start: "a"' + "?" * 50_000],
    ids=["lines", "marks"],
)
def test_reading_a_grammar_takes_linear_time(grammar: str) -> None:
    """One expression over empty lines held the whole process for minutes."""
    assert grammar_to_lark(grammar).text

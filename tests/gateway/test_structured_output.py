"""Formats of the output as grammars, and the reasons why some are refused."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from gateway_stack import Stack, field_of
from grammar_tokenizers import ADDED, byte_fallback, byte_level
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway_svc.structured import compiler as compiler_module
from gateway_svc.structured.compiler import MAX_FORMAT_BYTES, StructuredOutputCompiler
from quire.internal.v1 import logits_pb2
from quire.service.errors import RequestError
from quire.service.grammars import GrammarVocabulary
from quire.v1 import inference_pb2
from quire.v1 import structured_output_pb2 as pb

TOKENIZER = byte_level()
SIZE = TOKENIZER.get_vocab_size()
VOCABULARY = GrammarVocabulary.from_tokenizer(TOKENIZER, SIZE)
FIELD = "sampling_params.structured_output"


@pytest.fixture(autouse=True)
def _time_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer than the limit allows."""
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_S", 60)


@pytest.fixture(scope="module")
def compiler() -> StructuredOutputCompiler:
    return StructuredOutputCompiler(TOKENIZER, SIZE)


def _definition(compiler: StructuredOutputCompiler, output: pb.StructuredOutput) -> str:
    return asyncio.run(compiler.compile(FIELD, output)).definition


def _accepts(definition: str, text: str) -> bool:
    matcher = VOCABULARY.compile(definition)
    token_ids = TOKENIZER.encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def _random_text(definition: str, seed: int, max_tokens: int = 200) -> str:
    generator, matcher, token_ids = random.Random(seed), VOCABULARY.compile(definition), list[int]()
    while len(token_ids) < max_tokens:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        possible = np.unpackbits(mask, bitorder="little")[: SIZE + 1].nonzero()[0].tolist()
        tokens = [token_id for token_id in possible if token_id != VOCABULARY.end_id]
        if len(tokens) < len(possible) and (not tokens or generator.random() < 0.3):
            break
        token_ids.append(generator.choice(tokens))
        matcher.consume_token(token_ids[-1])
    return VOCABULARY.tokenizer.decode_str(token_ids)


def _refused(compiler: StructuredOutputCompiler, output: pb.StructuredOutput) -> RequestError:
    with pytest.raises(RequestError) as caught:
        _definition(compiler, output)
    assert caught.value.code.name == "INVALID_ARGUMENT"
    assert caught.value.message.startswith(f"{FIELD}.{output.WhichOneof('format')}: ")
    return caught.value


def _schema(**schema: Any) -> pb.StructuredOutput:
    return pb.StructuredOutput(json_schema=json.dumps(schema))


def test_documents_have_the_white_space_of_json_dumps(compiler: StructuredOutputCompiler) -> None:
    schema = _schema(
        type="object",
        properties={"a": {"type": "array", "items": {"type": "integer"}}, "b": {"const": [1, {}]}},
        required=["a", "b"],
    )
    definition = _definition(compiler, schema)
    assert _accepts(definition, '{"a": [1, 2], "b": [1, {}]}')
    assert not _accepts(definition, '{"a":[1,2],"b":[1,{}]}')
    assert not _accepts(definition, '{"a": [1, 2],  "b": [1, {}]}')


def test_options_of_the_library_in_a_schema_have_no_effect(
    compiler: StructuredOutputCompiler,
) -> None:
    options = {"whitespace_flexible": True, "lenient": True}
    lenient = {"type": "object", "not": {}, "x-guidance": options}
    assert "not" in _refused(compiler, _schema(**lenient)).message
    definition = _definition(compiler, _schema(type="array", **{"x-guidance": options}))
    assert not _accepts(definition, "[ 1]")


def test_any_object(compiler: StructuredOutputCompiler) -> None:
    definition = _definition(compiler, pb.StructuredOutput(json_object=pb.JsonObject()))
    assert _accepts(definition, '{"a": [true, null, {"b": -1.5e3}]}')
    assert not _accepts(definition, "[1]")


def test_true_allows_any_value(compiler: StructuredOutputCompiler) -> None:
    definition = _definition(compiler, pb.StructuredOutput(json_schema="true"))
    assert _accepts(definition, "[1]")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "not": {"const": "a"}}, "not at #"),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, "uniqueItems at #/prop"),
        ({"anyOf": [{"contains": {}}]}, "contains at #/anyOf/0"),
        ({"properties": {"not": {"if": {}, "then": {}}}}, "if at #/properties/not"),
        ({"type": "string", "format": "idn-email"}, "format at #"),
        ({"items": {"type": "string", "pattern": "(?=a)b"}}, "pattern at #/items"),
        ({"type": "nothing"}, "type at #"),
        ({"$ref": "#/$defs/none"}, "$ref at #"),
        ({"$ref": "https://example.com/schema"}, "$ref at #"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf at #"),
        ({"type": "integer", "multipleOf": 999_983}, "multipleOf at #"),
        (
            {"prefixItems": [{"multipleOf": 5003}, {"multipleOf": 5009}]},
            "multipleOf at #/prefixItems/1",
        ),
        ({"items": {"pattern": "a*" * 600}, "pattern": "b+" * 500}, "pattern at #/items"),
        ({"patternProperties": {r"a{2}" * 1001: {}}}, "patternProperties at #"),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "multipleOf at #/allOf/1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}, "exclusiveMinimum at #"),
        ({"minimum": -80.5, "exclusiveMaximum": -80.0}, "exclusiveMaximum at #"),
        (
            {"allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}], "type": "number"},
            "exclusiveMinimum at #",
        ),
    ],
)
def test_a_refused_schema_names_its_keyword(
    compiler: StructuredOutputCompiler, schema: dict[str, Any], keyword: str
) -> None:
    assert f"the keyword {keyword}" in _refused(compiler, _schema(**schema)).message


def test_numbers_that_the_library_reads_well_are_served(compiler: StructuredOutputCompiler) -> None:
    definition = _definition(compiler, _schema(type="number", exclusiveMinimum=0, maximum=1))
    assert _accepts(definition, "0.5")
    assert not _accepts(definition, "0")
    _definition(compiler, _schema(type="integer", exclusiveMinimum=0, exclusiveMaximum=1.5))
    _definition(compiler, _schema(type="number", multipleOf=0.01))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (pb.StructuredOutput(json_schema="{"), "is not JSON"),
        (pb.StructuredOutput(json_schema="3"), "must be an object or true"),
        (pb.StructuredOutput(json_schema="[" * 100_000), "nested too deeply"),
        (_schema(enum=[]), "refused"),
        (_schema(title="a" * MAX_FORMAT_BYTES), f"at most {MAX_FORMAT_BYTES}"),
        (pb.StructuredOutput(regex="a(?!b)"), "look-around"),
        (pb.StructuredOutput(regex="("), "refused"),
        (pb.StructuredOutput(regex="a\\\\\\"), "ends in a backslash that escapes nothing; remove"),
        (pb.StructuredOutput(regex="a?" * 999), "is refused: its regular expressions, with what"),
        (pb.StructuredOutput(regex="[a-z]?" * 999), "is refused: its regular expressions, with"),
        (pb.StructuredOutput(regex="a?" * 1001), "has 1001 quantifiers; at most 1000"),
        (pb.StructuredOutput(grammar=f"start: /{'(a|)' * 1001}/"), "has 1001 quantifiers"),
        (pb.StructuredOutput(grammar="start: A\nA: /(a{9})*/ & /a+/"), "an operator & or several"),
        (pb.StructuredOutput(grammar='start: A\nA: ~("a" | B)\nB: ~/a*/'), "several ~ at A, with"),
        (pb.StructuredOutput(choice=pb.Texts()), "has no texts"),
        (pb.StructuredOutput(grammar="start: missing"), "missing"),
        (pb.StructuredOutput(grammar='begin: "a"'), "start"),
        (pb.StructuredOutput(grammar='root ::= "a" missing'), "missing"),
        (pb.StructuredOutput(grammar='root ::= ("a"'), "EBNF"),
        (pb.StructuredOutput(structural_tag="[]"), "is not an object"),
        (pb.StructuredOutput(structural_tag='{"format": {"type": "x"}}'), "has the type 'x'"),
        (pb.StructuredOutput(structural_tag='{"structures": [], "triggers": []}'), "no triggers"),
    ],
)
def test_refused_formats(
    compiler: StructuredOutputCompiler, output: pb.StructuredOutput, reason: str
) -> None:
    assert reason in _refused(compiler, output).message


def test_a_message_without_a_format(compiler: StructuredOutputCompiler) -> None:
    with pytest.raises(RequestError, match="has no format"):
        _definition(compiler, pb.StructuredOutput())


def test_large_and_deep_schemas_are_refused_or_served_in_time(
    compiler: StructuredOutputCompiler,
) -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(50):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    _definition(compiler, _schema(**deep))
    options = [[{"required": [f"{at}_{one}"]} for one in range(8)] for at in range(8)]
    several = _schema(allOf=[{"type": "object"}, *({"anyOf": parts} for parts in options)])
    _refused(compiler, several)


def test_what_takes_too_long_is_refused(
    compiler: StructuredOutputCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_S", 1e-6)
    refused = _refused(compiler, _schema(type="object", properties={"a": {"type": "null"}}))
    assert "at most 1e-06 s are allowed" in refused.message


def _chain(num_rules: int) -> str:
    rules = [f"r{at}: r{at + 1}" for at in range(num_rules)]
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])


def test_rules_and_references_may_be_as_deep_as_the_size_allows(
    compiler: StructuredOutputCompiler,
) -> None:
    _definition(compiler, pb.StructuredOutput(grammar=_chain(5000)))
    parts = {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(3500)}
    chain = {"$ref": "#/$defs/0", "$defs": {**parts, "3500": {"type": "null"}}}
    _definition(compiler, _schema(**chain))


@pytest.mark.parametrize(
    "output",
    [
        pb.StructuredOutput(grammar='start: "a" start'),
        pb.StructuredOutput(grammar='start: "a"{100000}'),
        _schema(type="object", properties={"a": {"$ref": "#"}}, required=["a"]),
        _schema(type="array", minItems=100_000, items={"type": "null"}),
    ],
)
def test_formats_that_workers_could_not_begin_are_refused(
    compiler: StructuredOutputCompiler, output: pb.StructuredOutput
) -> None:
    assert "is refused" in _refused(compiler, output).message


def test_a_limit_at_the_first_token_is_found(compiler: StructuredOutputCompiler) -> None:
    """Behind it only the worker finds one."""
    texts = "|".join(f'"z{n} "' for n in range(2100))
    # Two first tokens are possible, so none is forced.
    grammar = f'start: "a" ({texts})+ | "b"'
    assert "Current row has" in _refused(compiler, pb.StructuredOutput(grammar=grammar)).message
    objects = [
        {"type": "object", "properties": {f"p{at}_{n}": {"type": "integer"} for n in range(400)}}
        for at in range(5)
    ]
    parts = {"a": {"type": "boolean"}, "b": {"anyOf": objects}}
    later = {"type": "object", "properties": parts, "required": ["a", "b"]}
    assert _definition(compiler, _schema(**later))


def test_regular_expressions_match_as_a_whole(compiler: StructuredOutputCompiler) -> None:
    for pattern in (r"\d{3}/[a-c]+", r"^\d{3}/[a-c]+$"):
        definition = _definition(compiler, pb.StructuredOutput(regex=pattern))
        assert _accepts(definition, "123/abc")
        assert not _accepts(definition, "x123/abc")
        assert not _accepts(definition, "123/")


def test_choices(compiler: StructuredOutputCompiler) -> None:
    texts = ["yes", "no", 'say "hi"\n', "größe 😀", "yes, but", "\x7f"]
    definition = _definition(compiler, pb.StructuredOutput(choice=pb.Texts(texts=texts)))
    assert all(_accepts(definition, text) for text in texts)
    assert not _accepts(definition, "yesno")

    assert {_random_text(definition, seed) for seed in range(40)} <= set(texts)


def test_thousands_of_choices(compiler: StructuredOutputCompiler) -> None:
    texts = [f"choice {at}" for at in range(4000)]
    definition = _definition(compiler, pb.StructuredOutput(choice=pb.Texts(texts=texts)))
    assert _accepts(definition, texts[77])


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" start "b" | /[0-9]/', 'root ::= "a" root "b" | [0-9]'],
)
def test_grammars_in_both_syntaxes(compiler: StructuredOutputCompiler, grammar: str) -> None:
    definition = _definition(compiler, pb.StructuredOutput(grammar=grammar))
    assert _accepts(definition, "aa7bb")
    assert not _accepts(definition, "aa7b")


def test_a_complement_and_repetitions_are_no_intersections(
    compiler: StructuredOutputCompiler,
) -> None:
    grammar = 'start: A | B\nA: ~/[^b]*/\nB: "c" ~ 2 "d"~3..4'
    definition = _definition(compiler, pb.StructuredOutput(grammar=grammar))
    assert all(_accepts(definition, text) for text in ("ab", "ccddd"))
    assert not any(_accepts(definition, text) for text in ("a", "cddd"))


def _tag(**tag: Any) -> pb.StructuredOutput:
    return pb.StructuredOutput(structural_tag=json.dumps(tag))


ARGUMENTS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CALL = {
    "begin": "<f=add>",
    "content": {"type": "json_schema", "json_schema": ARGUMENTS},
    "end": "</f>",
}


def test_the_older_form_of_structural_tags(compiler: StructuredOutputCompiler) -> None:
    structure = {"begin": "<f=add>", "schema": ARGUMENTS, "end": "</f>"}
    definition = _definition(compiler, _tag(structures=[structure], triggers=["<f="]))
    assert _accepts(definition, "some text")
    assert _accepts(definition, 'so: <f=add>{"n": 1}</f> and <f=add>{"n": 2}</f>.')
    assert not _accepts(definition, 'so: <f=sub>{"n": 1}</f>')
    assert not _accepts(definition, 'so: <f=add>{"n": "1"}</f>')


@pytest.mark.parametrize(
    ("options", "accepted", "refused"),
    [
        ({}, ["", "text", 'a <f=add>{"n": 1}</f> b'], ["<f=add>", "a <f="]),
        ({"at_least_one": True}, ['<f=add>{"n": 1}</f> b'], ["", "text", 'a <f=add>{"n": 1}</f>']),
        (
            {"at_least_one": True, "stop_after_first": True},
            ['<f=add>{"n": 1}</f>'],
            ['<f=add>{"n": 1}</f> b', '<f=add>{"n": 1}</f><f=add>{"n": 1}</f>'],
        ),
    ],
)
def test_triggered_tags(
    compiler: StructuredOutputCompiler,
    options: dict[str, bool],
    accepted: Sequence[str],
    refused: Sequence[str],
) -> None:
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], **options}
    definition = _definition(compiler, _tag(type="structural_tag", format=form))
    assert [text for text in accepted if not _accepts(definition, text)] == []
    assert [text for text in refused if _accepts(definition, text)] == []


def test_formats_within_structural_tags(compiler: StructuredOutputCompiler) -> None:
    digit = {"type": "regex", "pattern": "[0-9]/"}
    elements = [
        {"type": "const_string", "value": "a/"},
        {
            "type": "or",
            "elements": [{"type": "tag", **CALL}, digit],
        },
        {"type": "grammar", "grammar": 'root ::= "x" root | "y"'},
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "!"]},
        {
            "type": "tags_with_separator",
            "tags": [CALL],
            "separator": ", ",
            "at_least_one": True,
        },
    ]
    form = {"type": "sequence", "elements": elements}
    definition = _definition(compiler, _tag(format=form))
    call = '<f=add>{"n": 1}</f>'
    assert _accepts(definition, f"a/{call}xxy<t>any thing</t>{call}, {call}")
    assert _accepts(definition, f"a/7/y<t>!{call}")
    assert not _accepts(definition, f"a/7/x<t>!{call}")
    assert not _accepts(definition, f"a/7/y<t></t>any{call}")


def test_added_tokens_in_a_tag_are_tokens_of_the_model(compiler: StructuredOutputCompiler) -> None:
    call = {**CALL, "begin": f"{ADDED}\n"}
    form = {"type": "triggered_tags", "triggers": [ADDED], "tags": [call]}
    definition = _definition(compiler, _tag(format=form))
    token_ids = TOKENIZER.encode(f'text {ADDED}\n{{"n": 1}}</f>').ids
    assert TOKENIZER.token_to_id(ADDED) in token_ids
    matcher = VOCABULARY.compile(definition)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()


def test_a_format_is_compiled_once(compiler: StructuredOutputCompiler) -> None:
    schema = _schema(type="integer", minimum=17, maximum=19)
    assert _definition(compiler, schema) is _definition(compiler, schema)


def test_models_whose_tokenizer_has_no_bytes(compiler: StructuredOutputCompiler) -> None:
    with capture_logs() as logs:
        words = StructuredOutputCompiler(Tokenizer(WordLevel({"a": 0}, unk_token="a")), 1)
    assert [entry["event"] for entry in logs] == ["no structured output"]
    with pytest.raises(RequestError, match="tokenizer") as caught:
        _definition(words, _schema())
    assert caught.value.message.startswith(f"{FIELD}: ")
    fallback = byte_fallback()
    other = StructuredOutputCompiler(fallback, fallback.get_vocab_size())
    _definition(other, _schema(type="string"))


def test_the_vocabulary_is_read_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it holds the interpreter, and the tokens of other requests would wait."""
    compiler = StructuredOutputCompiler(TOKENIZER, SIZE)
    monkeypatch.setattr(GrammarVocabulary, "_read", None)
    assert _definition(compiler, _schema(type="integer"))


async def test_a_request_with_a_format(stack: Stack) -> None:
    """The worker gets the grammar, with the tokens that end it."""
    params = inference_pb2.SamplingParams(structured_output=_schema(type="boolean"))
    request = inference_pb2.GenerateRequest(text="The", sampling_params=params)
    call = stack.inference.Generate(request)
    submission = await stack.scheduler.serve_one(stack.encode("true"))
    assert (await call).choices[0].text == "true"
    changes = logits_pb2.LogitsParams.FromString(submission.params.logits_params)
    assert json.loads(changes.grammar.definition)["grammars"][0]["json_schema"]["type"] == "boolean"
    assert list(changes.stop_token_ids) == list(submission.params.stop_token_ids)


async def test_a_format_without_an_end(stack: Stack) -> None:
    params = inference_pb2.SamplingParams(
        structured_output=_schema(type="boolean"), ignore_eos=True
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.inference.Generate(
            inference_pb2.GenerateRequest(text="The", sampling_params=params)
        )
    assert field_of(caught.value) == "sampling_params.ignore_eos"

"""Grammars of calls: what they admit is what the parser of the format reads."""

import json
import random
from functools import cache
from typing import Any

import gateway_tokenizers
import pytest
from llguidance import LLMatcher
from output_texts import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from tokenizers import AddedToken, Tokenizer

from gateway_svc.generation import output_parsing
from gateway_svc.output_formats.calls import Tools
from gateway_svc.output_formats.formats import TOOL_FORMATS, ModelFormats
from gateway_svc.output_formats.guided import GuidedTool, UnguidedError, structural_tag
from gateway_svc.output_formats.parser import OutputParser, ParserOptions
from gateway_svc.output_formats.pieces import Arguments, CallEnd, CallStart, Content, Piece, joined
from gateway_svc.structured.structural_tags import structural_tag_to_lark
from quire.service.grammars import GrammarVocabulary
from quire.v1.conversation_pb2 import (
    TOOL_CHOICE_MODE_REQUIRED,
    Conversation,
    Message,
    Tool,
    ToolChoice,
)

CITIES = ["Bern", 'Zürich "HB" {<']
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "warm": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [GuidedTool("weather", WEATHER), GuidedTool("now", NOTHING)]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
# The formats, and chat templates that have another form of one.
EACH = [*((name, "") for name in TOOL_FORMATS), ("mistral", "[ARGS]"), ("deepseek", "```json")]
each_form = pytest.mark.parametrize(("name", "template"), EACH)
ARGUMENTS = '{"city": "Bern", "days": 2}'
_CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'


@cache
def vocabulary(are_special: bool) -> GrammarVocabulary:
    tokenizer = Tokenizer.from_str(gateway_tokenizers.byte_level().to_str())
    markers = sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers})
    if are_special:
        tokenizer.add_special_tokens(
            [AddedToken(marker, special=True, normalized=False) for marker in markers]
        )
    return GrammarVocabulary.from_tokenizer(tokenizer, tokenizer.get_vocab_size())


def matcher(are_special: bool, *args: Any, **kwargs: Any) -> LLMatcher:
    found = vocabulary(are_special)
    source = structural_tag_to_lark(structural_tag(*args, **kwargs), found.special_tokenizer)
    return found.compile(LLMatcher.grammar_from_lark(source.text))


def accepts(matcher: LLMatcher, are_special: bool, text: str) -> bool:
    token_ids = vocabulary(are_special).special_tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def generated(matcher: LLMatcher, are_special: bool, source: random.Random) -> str:
    """A random text of a grammar."""
    found = vocabulary(are_special)
    token_ids: list[int] = []
    while True:
        mask = matcher.compute_bitmask()
        bits = int.from_bytes(mask, "little")
        possible = [at for at in range(found.size) if bits >> at & 1]
        assert possible, matcher.get_error()
        chosen = source.choice(possible)
        if chosen == found.end_id:
            return found.tokenizer.decode_bytes(token_ids).decode()
        assert matcher.consume_token(chosen)
        token_ids.append(chosen)


@each_form
@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("is_single", [False, True], ids=["several", "single"])
def test_random_calls_are_read_as_calls(
    name: str, template: str, are_special: bool, is_single: bool
) -> None:
    source = random.Random(5)
    for _ in range(3):
        grammar = matcher(are_special, name, template, TOOLS, True, is_single)
        if name == "harmony":
            # Its reasoning is any text.
            skip = "<|channel|>commentary to=functions."
            ids = vocabulary(are_special).special_tokenizer.tokenize_str(skip, parse_special=True)
            assert grammar.try_consume_tokens(ids) == len(ids)
            text = skip + generated(grammar, are_special, source)
        else:
            text = generated(grammar, are_special, source)
        parser = OutputParser(ParserOptions(name, None, False, Tools(SCHEMAS, True)))
        pieces = [*parser.push(text), *parser.flush()]
        assert not any(isinstance(piece, Content) for piece in pieces), text
        starts = [piece for piece in pieces if isinstance(piece, CallStart)]
        assert len(starts) == sum(isinstance(piece, CallEnd) for piece in pieces) > 0
        assert len(starts) == 1 or not is_single
        for start in starts:
            of_call = [p for p in pieces if isinstance(p, Arguments) and p.index == start.index]
            check(start.name, json.loads("".join(piece.text for piece in of_call)))
        check_cuts(name, text)


def parsed(name: str, tools: Tools, text: str) -> list[Piece]:
    parser = OutputParser(ParserOptions(name, None, False, tools))
    return joined([*parser.push(text), *parser.flush()])


def check_cuts(name: str, text: str) -> None:
    """No part of a forced call is content, wherever the output ends."""
    for at in range(len(text)):
        if name == "harmony" and text.rfind("<", 0, at) > text.rfind(">", 0, at):
            continue  # Its markers are special tokens, of which the text has no part.
        options = ParserOptions(name, None, False, Tools(SCHEMAS, True, are_forced=True))
        parser = OutputParser(options)
        pieces = [*parser.push(text[:at]), *parser.flush()]
        assert not any(isinstance(piece, Content) for piece in pieces), text[:at]


def check(name: str, arguments: dict[str, Any]) -> None:
    if name == "now":
        assert arguments == {}
        return
    assert set(arguments) <= set(WEATHER["properties"])
    assert arguments["city"] in CITIES
    assert arguments.get("days", 0) in range(10)
    assert isinstance(arguments.get("warm", True), bool)


FREE = {
    "hermes": f"So:\n<tool_call>\n{_CALL}\n</tool_call>",
    "mistral": f"So: [TOOL_CALLS][{_CALL}]",
    "deepseek": f"So: {CALLS_BEGIN}{CALL_BEGIN}weather{SEPARATOR}{ARGUMENTS}{CALL_END}{CALLS_END}",
    "glm": "So:\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "qwen3_coder": "So:\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "harmony": "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
}


@pytest.mark.parametrize(
    ("name", "are_special"),
    # Harmony's markers are special tokens.
    [(name, are) for name in FREE for are in (False, True) if are or name != "harmony"],
)
def test_strict_tools_leave_text_free(name: str, are_special: bool) -> None:
    text = FREE[name]
    plain = "<|channel|>final<|message|>So." if name == "harmony" else "So."
    for one, is_valid in [
        (text, True),
        (plain, True),
        (text.replace("Bern", "Rome"), False),
        (text.replace("weather", "other"), False),
    ]:
        grammar = matcher(are_special, name, "", TOOLS, False, False)
        assert accepts(grammar, are_special, one) == is_valid, one


@pytest.mark.parametrize("are_special", [False, True], ids=["text", "special"])
def test_a_call_without_its_outer_marker_follows_its_schema(are_special: bool) -> None:
    name, known = "qwen3_coder", Tools(SCHEMAS, True, held_names=frozenset(SCHEMAS))
    call = FREE[name].removeprefix("So:\n")
    bare = call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    for text, num_calls in [
        (bare, 1),
        (f"So: {bare}\n</tool_call>\n{bare}", 2),
        (f"{call}\n{bare} <function {call}", 3),
        ("a <function b", 0),
    ]:
        grammar = matcher(are_special, name, "", TOOLS, False, False)
        assert accepts(grammar, are_special, text), text
        pieces = parsed(name, known, text)
        found = [one.text for one in pieces if isinstance(one, Arguments)]
        assert found == [ARGUMENTS] * num_calls
    wrong = bare.replace("Bern", "Rome")
    for text in (
        wrong,
        f"So: {call}\n{bare}\n{wrong}",
        bare.replace("weather", "other"),
        bare.replace("\n<parameter=city>\nBern\n</parameter>", ""),
        f"<tool_call>So: {bare}",
        f"{bare}<tool_call>So",
    ):
        grammar = matcher(are_special, name, "", TOOLS, False, False)
        assert not accepts(grammar, are_special, text), text


@pytest.mark.parametrize("name", ["llama3", "json"])
def test_free_text_is_never_read_as_a_call_that_begins_the_output(name: str) -> None:
    call = '{"name": "weather", "parameters": {"city": "Rome"}}'
    call = f"[{call}]" if name == "json" else call
    for space in ("", " ", "\n", "\t\r\n "):
        grammar = matcher(False, name, "", TOOLS, False, False)
        assert not accepts(grammar, False, space + call), space
    for text in ("", " ", "\n So.", f"So: {call}", f" <|python_tag|>{call}"):
        assert accepts(matcher(False, name, "", TOOLS, False, False), False, text), text
        assert parsed(name, Tools(SCHEMAS, True), text) == [Content(text)] * bool(text)


@pytest.mark.parametrize(
    ("name", "are_special"),
    [(name, are) for name in FREE for are in (False, True) if are or name != "harmony"],
)
def test_either_calls_or_content_that_follows_a_format(name: str, are_special: bool) -> None:
    begin = "<|channel|>final<|message|>" if name == "harmony" else ""
    content = {"type": "json_schema", "json_schema": {"properties": {"name": {"type": "string"}}}}
    call = FREE[name].removeprefix("So:").lstrip()
    for one, is_valid in [
        (call, True),
        # Without a marker it is content, which may have more properties.
        (call.replace("Bern", "Rome"), name == "llama3"),
        (begin + '{"name": "weather", "more": 1}', True),
        (begin + '{"name": 1}', False),
        (begin + "So.", False),
    ]:
        grammar = matcher(are_special, name, "", TOOLS, False, False, content=content)
        assert accepts(grammar, are_special, one) == is_valid, one
    parser = OutputParser(ParserOptions(name, None, False, Tools(SCHEMAS)))
    text = begin + '{"name": "weather", "more": 1}'
    pieces = [*parser.push(text), *parser.flush()]
    contents = [piece.text for piece in pieces if isinstance(piece, Content)]
    assert len(contents) == len(pieces)
    assert begin + "".join(contents) == text


QUOTED = {
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    "deepseek": f"{CALLS_BEGIN}{CALL_BEGIN}now{SEPARATOR}{{}}{CALL_END}{CALLS_END}",
    "glm": "<tool_call>now</tool_call>",
    "qwen3_coder": "<tool_call><function=now></function></tool_call>",
}


def test_content_that_quotes_a_call_stays_content() -> None:
    for name, call in QUOTED.items():
        tools = Tools(SCHEMAS, begin_output=True)
        text = f'{{"quoted": "{call}"}}'
        parser = OutputParser(ParserOptions(name, None, False, tools))
        pieces = [piece for part in text for piece in parser.push(part)] + [*parser.flush()]
        assert "".join(p.text for p in pieces if isinstance(p, Content)) == text, name
        parser = OutputParser(ParserOptions(name, None, False, tools))
        pieces = [*parser.push(f"{call}\n{call}"), *parser.flush()]
        assert [p.name for p in pieces if isinstance(p, CallStart)] == ["now", "now"], name


def test_a_bare_call_keeps_references_within_its_schema() -> None:
    days = {"type": "integer", "minimum": 1}
    schema = {"properties": {"days": {"$ref": "#/$defs/days"}}, "$defs": {"days": days}}
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    for text, is_valid in [
        ('{"name": "f", "parameters": {"days": 2}}', True),
        ('{"name": "f", "parameters": {"days": 2}}; {"name": "f", "parameters": {}}', True),
        ('{"name": "f", "parameters": {"days": 0}}', False),
        ("5", True),
    ]:
        tools = [GuidedTool("f", {**schema, "type": "object"})]
        grammar = matcher(False, "llama3", "", tools, False, False, content=content)
        assert accepts(grammar, False, text) == is_valid, text


def test_a_bare_call_keeps_the_version_and_the_constants_of_its_schema() -> None:
    pair = {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}
    place = {"const": {"$ref": "#/a"}}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"const": {"$ref": "#/definitions/pair"}, "place": place},
        "definitions": {"pair": pair},
    }
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    for arguments, is_valid in [
        ('{"const": [1], "place": {"$ref": "#/a"}}', True),
        ('{"const": ["a"]}', False),
        ('{"place": {"$ref": "#/b"}}', False),
    ]:
        tools = [GuidedTool("f", schema)]
        grammar = matcher(False, "llama3", "", tools, False, False, content=content)
        text = f'{{"name": "f", "parameters": {arguments}}}'
        assert accepts(grammar, False, text) == is_valid, arguments


def test_properties_that_a_schema_does_not_name_are_not_generated() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"one": inner, "any": {"type": "object"}}}
    for arguments, is_valid in [
        ('{"one": {"a": 1}, "any": {"b": 2}}', True),
        ('{"one": {"b": 1}}', False),
        ('{"other": 1}', False),
    ]:
        grammar = matcher(False, "json", "", [GuidedTool("f", schema)], True, True)
        text = f'[{{"name": "f", "parameters": {arguments}}}]'
        assert accepts(grammar, False, text) == is_valid, arguments


@pytest.mark.parametrize("name", ["json", "glm"])
def test_a_property_that_is_required_alone_is_generated(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}
    call = {
        "json": '[{"name": "f", "parameters": {"a": 1, "b": [2]}}]',
        "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>[2]</arg_value>\n</tool_call>",
    }[name]
    for text, is_valid in [(call, True), (call.replace("b", "c", 1), False)]:
        grammar = matcher(False, name, "", [GuidedTool("f", schema)], True, True)
        assert accepts(grammar, False, text) == is_valid, text


def test_line_feeds_may_follow_the_reasoning() -> None:
    text = f"<tool_call>\n{_CALL}\n</tool_call>"
    for space, is_valid in [("", True), ("\n\n", True), ("\n\n\n", False)]:
        grammar = matcher(False, "hermes", "", TOOLS, True, True, follows_reasoning=True)
        assert accepts(grammar, False, space + text) == is_valid
    # Its grammar has the reasoning, too: they would precede it, and be content.
    text = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
    for space, is_valid in [("", True), ("\n\n", False)]:
        grammar = matcher(False, "harmony", "", TOOLS, True, True, follows_reasoning=True)
        assert accepts(grammar, False, space + text) == is_valid


def test_an_argument_that_is_no_string_is_json() -> None:
    schema = {
        "type": "object",
        "properties": {"any": {"$ref": "#/$defs/one"}, "text": {"type": "string"}},
        "$defs": {"one": {"type": "array", "items": {"type": "integer"}}},
    }
    tools = [GuidedTool("f", schema)]
    for value, is_valid in [("[1, 2]", True), ("[true]", False)]:
        text = (
            f"<tool_call>f\n<arg_key>any</arg_key>\n<arg_value>{value}</arg_value>\n"
            "<arg_key>text</arg_key>\n<arg_value>a <b></arg_value>\n</tool_call>"
        )
        assert accepts(matcher(False, "glm", "", tools, True, True), False, text) == is_valid


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
def test_a_value_that_may_be_more_than_a_string_is_read_as_json(name: str) -> None:
    """Such as pydantic's optional string, which the grammar has in quotes."""
    number: list[Any] = [{"type": "string", "enum": ["7"]}, {"enum": [8]}]
    schema = {
        "type": "object",
        "properties": {
            "city": {"anyOf": [{"type": "string", "enum": CITIES}, {"type": "null"}]},
            "days": {"anyOf": number},
            "warm": {"type": "string", "enum": ["null"]},
        },
        "required": ["city", "days", "warm"],
    }
    tools = Tools({"f": schema}, True, held_names=frozenset({"f"}))
    source = random.Random(5)
    for _ in range(5):
        grammar = matcher(False, name, "", [GuidedTool("f", schema)], True, True)
        parser = OutputParser(ParserOptions(name, None, False, tools))
        pieces = [*parser.push(generated(grammar, False, source)), *parser.flush()]
        arguments = json.loads("".join(p.text for p in pieces if isinstance(p, Arguments)))
        assert arguments["city"] in [*CITIES, None]
        assert arguments["days"] in ["7", 8]
        assert arguments["warm"] == "null"


def written_call(name: str, tool: str, **arguments: str) -> str:
    """A call in a format that writes arguments one by one, with values as they are."""
    if name == "glm":
        parts = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{tool}\n{''.join(parts)}</tool_call>"
    parts = (f"<parameter={key}>\n{value}</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={tool}>\n{''.join(parts)}</function>\n</tool_call>"


ENDS = {"glm": "</arg_value>", "qwen3_coder": "</parameter>"}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("is_forced", [False, True], ids=["free", "forced"])
def test_a_value_ends_for_the_grammar_where_it_does_for_the_parser(
    name: str, is_forced: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "any": {"type": ["string", "null", "array"]}},
        "required": ["text", "any"],
    }
    tools = [GuidedTool("f", schema)]
    known = Tools({"f": schema}, True, held_names=frozenset({"f"}))
    end, space = ENDS[name], "" if name == "glm" else "\n"
    for plain, value in [
        (f"a{space}", "a"),
        (space, ""),
        (f"<a>\n</a>\n{space}", "<a>\n</a>\n"),
        ("Paris", "Paris"),
    ]:
        for quoted in (f'"\\" {end}\\n<b>"', "null", f'["{end}", "]"]'):
            text = written_call(name, "f", text=plain, any=f"{quoted}{space}")
            assert accepts(matcher(False, name, "", tools, is_forced, False), False, text), text
            pieces = parsed(name, known, text)
            assert [type(piece) for piece in pieces] == [CallStart, Arguments, CallEnd], text
            arguments = "".join(one.text for one in pieces if isinstance(one, Arguments))
            assert json.loads(arguments) == {"text": value, "any": json.loads(quoted)}
    for plain in (f"a{end}b", f"a{end}{end}", f"{end} "):
        text = written_call(name, "f", text=f"{plain}{space}", any=f"null{space}")
        assert not accepts(matcher(False, name, "", tools, is_forced, False), False, text), text


@pytest.mark.parametrize("name", ENDS)
def test_no_call_of_a_strict_tool_is_within_one_of_another_tool(name: str) -> None:
    tools = [GuidedTool("f", {}), GuidedTool("weather", WEATHER)]
    space = "" if name == "glm" else "\n"
    broken = written_call(name, "weather", city=f"Rome{space}")
    for inner, is_valid in [({}, True), ({"a": f"1{space}", "b": f" {broken[:11]}"}, True)]:
        text = written_call(name, "f", **inner)
        assert accepts(matcher(False, name, "", tools, False, False), False, text) == is_valid
    for text in (
        written_call(name, "f", a=f"1{space}") + broken,
        written_call(name, "f").replace("</", f"-{broken}\n</", 1),
    ):
        assert not accepts(matcher(False, name, "", tools, False, False), False, text), text


def test_a_parser_knows_whose_arguments_follow_their_schemas() -> None:
    messages = [Message(role="user", content="x")]
    offered = [Tool(name="f", strict=True), Tool(name="g")]
    forced = ToolChoice(mode=TOOL_CHOICE_MODE_REQUIRED)
    for tool_format, choice, held in [
        ("glm", ToolChoice(), {"f"}),
        ("glm", forced, {"f", "g"}),
        ("hermes", forced, set()),
    ]:
        conversation = Conversation(messages=messages, tools=offered, tool_choice=choice)
        parsing = output_parsing.choose(conversation, ModelFormats(tool_format), "")
        assert parsing is not None
        assert set(parsing.held_tool_names) == held


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
def test_tools_that_are_not_strict_get_arguments_beside_those_that_are(name: str) -> None:
    text = {
        "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
    }[name]
    tools = [GuidedTool("f", {}), GuidedTool("weather", WEATHER)]
    for content in (None, {"type": "regex", "pattern": "a+"}):
        grammar = matcher(False, name, "", tools, False, False, content=content)
        assert accepts(grammar, False, text)
    known = Tools({"f": None, "weather": WEATHER}, True, held_names=frozenset({"weather"}))
    parser = OutputParser(ParserOptions(name, None, False, known))
    pieces = [*parser.push(text), *parser.flush()]
    assert "".join(p.text for p in pieces if isinstance(p, Arguments)) == '{"a": 1}'
    # It may be broken, and is text then.
    broken = text.replace("</parameter>", "").replace("</arg_value>", "")
    parser = OutputParser(ParserOptions(name, None, False, known))
    assert joined([*parser.push(broken), *parser.flush()]) == [Content(broken)]


def test_a_schema_that_a_format_cannot_guide_is_refused() -> None:
    with pytest.raises(UnguidedError, match="the schema of f has keywords other than properties"):
        structural_tag("glm", "", [GuidedTool("f", {"anyOf": [{}]})], True, True)
    for name, properties, marker in [
        ("glm", {"a</arg_key>b": {}}, "</arg_key>"),
        ("qwen3_coder", {"a>b": {}}, ">"),
        ("qwen3_coder", {"a": {"enum": ["</parameter>"]}}, "</parameter>"),
    ]:
        with pytest.raises(UnguidedError, match=f"has {marker}, which ends it"):
            structural_tag(name, "", [GuidedTool("f", {"properties": properties})], True, True)
    for required in (5, [[]]):
        schema = {"properties": {"a": {}}, "required": required}
        with pytest.raises(UnguidedError, match="`required` in the schema of f is no list"):
            structural_tag("glm", "", [GuidedTool("f", schema)], True, True)

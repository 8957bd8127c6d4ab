"""Parsers of reasoning and calls: a text gives the same pieces however it is cut."""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_texts import (
    CALL_BEGIN,
    CALL_END,
    CALLS_END,
    NOW,
    RECORDED,
    SCHEMAS,
    SEPARATOR,
    Recorded,
)

from gateway_svc.output_formats.calls import Tools
from gateway_svc.output_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.output_formats.parser import OutputParser, ParserOptions
from gateway_svc.output_formats.pieces import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    joined,
)

each_text = pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED)
# Texts whose pairs of cuts are all tried.
SHORT = 75


def parse(options: ParserOptions, text: str, cuts: Iterable[int] = ()) -> list[Piece]:
    parser = OutputParser(options)
    pieces: list[Piece] = []
    for start, end in pairwise([0, *cuts, len(text)]):
        pieces += parser.push(text[start:end])
    return joined([*pieces, *parser.flush()])


def texts(pieces: Iterable[Piece], kind: type) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def calls(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Complete calls, in order."""
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    ends = {piece.index for piece in pieces if isinstance(piece, CallEnd)}
    arguments = [
        "".join(p.text for p in pieces if isinstance(p, Arguments) and p.index == start.index)
        for start in starts
    ]
    return [
        (start.name, text)
        for start, text in zip(starts, arguments, strict=True)
        if start.index in ends
    ]


@each_text
def test_a_text_is_split(recorded: Recorded) -> None:
    pieces = parse(recorded.options(), recorded.text)
    assert texts(pieces, Reasoning) == recorded.reasoning
    assert texts(pieces, Content) == recorded.content
    assert calls(pieces) == recorded.calls


@each_text
@pytest.mark.parametrize("are_guided", [False, True], ids=["free", "guided"])
def test_every_cut_gives_the_same(recorded: Recorded, are_guided: bool) -> None:
    options, text = recorded.options(are_guided), recorded.text
    whole = parse(options, text)
    assert parse(options, text, range(1, len(text))) == whole
    for at in range(1, len(text)):
        assert parse(options, text, [at]) == whole
    if len(text) <= SHORT:
        for cuts in combinations(range(1, len(text)), 2):
            assert parse(options, text, cuts) == whole


@each_text
@pytest.mark.parametrize("are_guided", [False, True], ids=["free", "guided"])
def test_pieces_depend_only_on_the_text_before(recorded: Recorded, are_guided: bool) -> None:
    """So another gateway can continue after any token."""
    options = recorded.options(are_guided)
    by_character = OutputParser(options)
    pieces: list[Piece] = []
    for at, character in enumerate(recorded.text, 1):
        pieces = joined([*pieces, *by_character.push(character)])
        at_once = OutputParser(options)
        assert list(at_once.push(recorded.text[:at])) == pieces
        assert at_once.is_reasoning == by_character.is_reasoning


@each_text
def test_a_guided_output_has_the_same_calls(recorded: Recorded) -> None:
    """Their arguments come as they are generated; broken ones do not occur, nor Llama's tag."""
    if recorded.calls and "broken" not in recorded.text and "python_tag" not in recorded.text:
        pieces = parse(recorded.options(are_guided=True), recorded.text)
        assert calls(pieces) == recorded.calls or recorded.content


def test_guided_arguments_are_not_held_back() -> None:
    recorded = RECORDED["hermes"]
    at = recorded.text.index('"days"')
    for are_guided in (False, True):
        parser = OutputParser(recorded.options(are_guided))
        pieces = parser.push(recorded.text[:at])
        assert ("Zürich" in texts(pieces, Arguments)) == are_guided


def test_a_guided_call_that_is_cut_keeps_its_begin() -> None:
    options = RECORDED["hermes"].options(are_guided=True)
    pieces = parse(options, '<tool_call>{"name": "now", "arguments": {"a')
    assert pieces == [CallStart(0, "now"), Arguments(0, '{"a')]


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek", "glm", "qwen3_coder"])
def test_no_part_of_a_guided_call_that_is_cut_is_content(name: str) -> None:
    recorded = next(one for key, one in RECORDED.items() if key.startswith(name) and one.calls)
    for at in range(len(recorded.text)):
        parser = OutputParser(recorded.options(are_guided=True))
        before, rest = joined(parser.push(recorded.text[:at])), joined(parser.flush())
        if isinstance(before[-1] if before else None, CallStart | Arguments):
            assert texts(rest, Content) == ""


@pytest.mark.parametrize(
    ("name", "call", "markers"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "\n</tool_call>"),
        ("deepseek", f"{CALL_BEGIN}now{SEPARATOR}{{}}", f"{CALL_END}{CALLS_END}"),
        ("qwen3_coder", "<tool_call><function=now></function>", "\n</tool_call>"),
    ],
)
def test_a_marker_behind_a_call_is_no_content_if_it_is_cut(
    name: str, call: str, markers: str
) -> None:
    for at in range(len(markers)):
        pieces = parse(ParserOptions(name, None, False, Tools(SCHEMAS)), call + markers[:at])
        assert pieces == [CallStart(0, "now"), Arguments(0, "{}"), CallEnd(0)]


def test_a_header_that_is_cut_is_no_content() -> None:
    options = ParserOptions("harmony", "harmony")
    for text in (
        "<|channel|>",
        "<|channel|>analysis",
        "<|channel|>commentary to=functions.now <|constrain|>json",
        " to=functions.now<|channel|>commentary json",
    ):
        assert parse(options, text) == []
        before = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
        assert parse(options, before + text) == [Reasoning("Why?")]
    # A long one would take minutes if it were read again from each of its characters.
    for broken in ("<|channel|>final It is warm.", f" to={'a' * 2**17} is warm."):
        assert parse(options, broken) == [Content(broken)]


@each_text
def test_only_the_first_of_single_calls_is_kept(recorded: Recorded) -> None:
    pieces = parse(recorded.options(is_single=True), recorded.text)
    assert calls(pieces) == recorded.calls[:1]
    assert texts(pieces, Content) == recorded.content


def test_tokens_of_reasoning_can_be_counted() -> None:
    recorded = RECORDED["qwen3"]
    parser = OutputParser(recorded.options())
    states = []
    for character in recorded.text:
        parser.push(character)
        states.append(parser.is_reasoning)
    end = recorded.text.index("</think>") + len("</think>")
    assert states.index(True) == len("<think>") - 1
    assert states[: end - 1].count(True) == end - len("<think>")
    assert not any(states[end - 1 :])


FRAGMENTS = [
    *sorted({one for form in TOOL_FORMATS.values() for one in form.markers}),
    *(one for pair in REASONING_FORMATS.values() for one in (pair.start, pair.end)),
    *('{"name": "', "now", '", "arguments": ', "{}", "}", ', "parameters": ', "[", "]", ", ", ";"),
    *("<function=", "<parameter=", "</parameter>", "</function>", ">", "function", "```json"),
    *(" ", "\n", "a", '"', "\\", " to=functions.now", "final", "analysis", "<", '{"name": "now"'),
]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    is_open=st.booleans(),
    are_guided=st.booleans(),
    reasoning=st.sampled_from([None, *REASONING_FORMATS]),
)
@settings(max_examples=150, deadline=None)
def test_any_text_in_any_parts(
    name: str,
    parts: list[str],
    cuts: list[int],
    is_open: bool,
    are_guided: bool,
    reasoning: str | None,
) -> None:
    text = "".join(parts)
    options = ParserOptions(name, reasoning, is_open, Tools(SCHEMAS, are_guided))
    whole = parse(options, text)
    assert parse(options, text, range(1, len(text))) == whole
    assert parse(options, text, sorted(cut % (len(text) + 1) for cut in cuts)) == whole
    if are_guided or reasoning is not None or name == "harmony":
        return
    if not calls(whole):
        # Nothing is lost where nothing is a call.
        assert texts(whole, Content) == text


def test_space_before_what_is_no_call_is_content() -> None:
    for name, form in TOOL_FORMATS.items():
        for text in (f" \n{marker} none" for marker in form.markers if name != "harmony"):
            pieces = parse(ParserOptions(name, None, False, Tools(SCHEMAS)), text)
            assert texts(pieces, Content) == text
    recorded = RECORDED["hermes"]
    pieces = parse(recorded.options(), f"{recorded.text}\n<tool_call>none")
    assert texts(pieces, Content) == f"{recorded.content}\n<tool_call>none"


def test_a_call_of_each_format_in_the_middle_of_noise() -> None:
    """A call that is begun and broken off does not hide the next one."""
    text = '<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    pieces = parse(RECORDED["hermes"].options(), text)
    assert (texts(pieces, Content), calls(pieces)) == ("<tool_call>", [NOW])


@pytest.mark.parametrize(
    ("tool_format", "form"),
    [
        ("hermes", "<tool_call>%s</tool_call>"),
        ("llama3", "<|python_tag|>%s"),
        ("mistral", "[TOOL_CALLS][%s]"),
    ],
)
def test_a_call_that_could_not_be_sent_back_is_text(tool_format: str, form: str) -> None:
    for name, arguments in [
        ("", "{}"),
        ("the weather", "{}"),
        ("n" * 129, "{}"),
        ("\\ud800", "{}"),
        ("now", '{"a": "\\ud800"}'),
        ("now", '{"a": 1e999}'),
    ]:
        text = form % f'{{"name": "{name}", "arguments": {arguments}}}'
        pieces = parse(ParserOptions(tool_format, tools=Tools(SCHEMAS)), text)
        assert (calls(pieces), texts(pieces, Content).encode()) == ([], text.encode())


@pytest.mark.parametrize("alternatives", [None, 5, "string", {"type": "string"}, [None, 5, "s"]])
@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_arguments_of_a_schema_that_is_not_valid_are_json_if_they_can_be(
    keyword: str, alternatives: object
) -> None:
    """Schemas of tools are checked only if a grammar holds calls to them."""
    tools = Tools({"f": {"properties": {"a": {keyword: alternatives}}}})
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert calls(parse(ParserOptions("glm", tools=tools), text)) == [("f", '{"a": 1}')]

"""Formats whose forced text has no end: the library would append it for ever."""

import asyncio
import json

import numpy as np
import pytest
from grammar_tokenizers import byte_level

from gateway_svc.structured import compiler as compiler_module
from gateway_svc.structured.compiler import StructuredOutputCompiler
from gateway_svc.structured.patterns import may_repeat_one_text
from quire.service.grammars import GrammarVocabulary
from quire.v1 import structured_output_pb2 as pb

TOKENIZER = byte_level()
VOCABULARY = GrammarVocabulary.from_tokenizer(TOKENIZER, TOKENIZER.get_vocab_size())


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> StructuredOutputCompiler:
    # A busy machine takes longer than the limit allows.
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_S", 60)
    return StructuredOutputCompiler(TOKENIZER, TOKENIZER.get_vocab_size())


def _definition(compiler: StructuredOutputCompiler, output: pb.StructuredOutput) -> str:
    return asyncio.run(compiler.compile("structured_output", output)).definition


@pytest.mark.parametrize(
    "pattern",
    [
        *("a+", "(ab)*", "a{2,}", "a*?", "[a]+", "[a-a]*", r"[\"\"]*", r'["\"]*', "(aa|a)+", "()*"),
        # A choice in front of the part or in a part that cannot occur is none.
        *("[bc](a)*", "([bc]{0}a)*", "([bc]{0,0}a)*", "(a|[bc]^)*", r"(a|[bc]\b)*"),
        # What is left of a set by operators, and classes of one character or none.
        *("[ab--b]+", "[ab&&b]+", r"\p{Zl}+", r"(a|[bc]\P{Any})*", r"[^\x00-\x60b-\u{10ffff}]+"),
        # Flags, of which one makes the rest a comment.
        *("(?x)(a # [bc]\n)+", "(?i)[ab]+", "(?<name>[ab])+"),
        # What the library refuses.
        *("(", "a)", "["),
    ],
)
def test_what_may_repeat_one_text_is_found(pattern: str) -> None:
    assert may_repeat_one_text(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("abc", "a?b?", "a{2,5}", ".*", r"(.|\n)*", r"\d+", r"\w+\s*", "[a-z]+", r"[ \n]*"),
        *('[^"]*', r'"[a-z ]*"', "([ab]c)*", "(a|[bc])*", "(?:[ab])+", "([ab]{2})*", "[ab]{1,2}"),
    ],
)
def test_what_has_a_choice_may_repeat(pattern: str) -> None:
    assert not may_repeat_one_text(pattern)


def _tag(content: dict[str, object]) -> pb.StructuredOutput:
    return pb.StructuredOutput(
        structural_tag=json.dumps({"type": "structural_tag", "format": content})
    )


A_OR_MORE = {"type": "regex", "pattern": "a+"}
ENDLESS = [
    pb.StructuredOutput(grammar=grammar)
    for grammar in (
        'start: /a+/ "a"',
        # Behind what is checked before the request is accepted.
        'start: ("b"|"c") ("d"|"e") /a+/ "a"',
        'start: MANY "a"\nMANY: "a"+',
        'start: MANY "a"\nMANY: ONE{2,}\nONE: "a"',
        'start: "b" part\npart: %lark {\nstart: /a+/ "a"\n}',
        '%llguidance {"no_forcing": false}\nstart: /a+/ "a"',
        'start: /a+/ "a"\n%llguidance {"no_forcing": false}',
        'start: /a # [bc] +/x "a"',
    )
] + [
    _tag({"type": "tag", "begin": "<a>", "content": A_OR_MORE, "end": "a"}),
    _tag({"type": "sequence", "elements": [A_OR_MORE, {"type": "const_string", "value": "ab"}]}),
    _tag(
        {
            "type": "sequence",
            "elements": [
                {"type": "grammar", "grammar": "start: /a+/"},
                {"type": "const_string", "value": "ab"},
            ],
        }
    ),
]


@pytest.mark.parametrize("output", ENDLESS, ids=range(len(ENDLESS)))
def test_masks_of_an_endless_text_are_computed(
    compiler: StructuredOutputCompiler, output: pb.StructuredOutput
) -> None:
    matcher = VOCABULARY.compile(_definition(compiler, output))
    for _ in range(20):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        possible = np.unpackbits(mask, bitorder="little").nonzero()[0]
        assert len(possible)
        assert matcher.consume_token(int(possible[0]))
        matcher.compute_ff_tokens()
        if matcher.is_stopped():
            break


def test_other_grammars_still_force_text(compiler: StructuredOutputCompiler) -> None:
    for output in (
        pb.StructuredOutput(grammar='start: "hello world " /[a-z]+/ " goodbye"'),
        pb.StructuredOutput(grammar='start: "hello world " "!"*'),
        _tag({"type": "tag", "begin": "hello world ", "content": {"type": "any_text"}, "end": "!"}),
    ):
        matcher = VOCABULARY.compile(_definition(compiler, output))
        forced = matcher.compute_ff_tokens()
        assert TOKENIZER.decode(forced).startswith("hello world")

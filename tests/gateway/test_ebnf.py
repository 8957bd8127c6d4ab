"""Grammars in EBNF as llama.cpp and xgrammar read them."""

import re

import pytest
from format_grammars import SIZE, TOKENIZER, accepts, definition_of

from gateway_svc.structured.compiler import StructuredOutputCompiler
from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.lark import grammar_to_lark
from quire.v1 import structured_output_pb2 as pb


@pytest.fixture(scope="module")
def compiler() -> StructuredOutputCompiler:
    return StructuredOutputCompiler(TOKENIZER, SIZE)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\x41\u0042\U00000043\u00e9\U0001F600\[\]\u0022\u005c"', 'ABCé😀[]"\\'),
        (
            r"root ::= [\u00e0-\u00ef] [\U0001F600-\U0001F64F] [\u005b] [\u005d\u005e\u002d]",
            "é😃[^",
        ),
        ('root ::= "a" # first\r\n  # | "x"\n  | b\n\n  | [c|#"]+\nb ::= "|#"', '|"c#'),
        ('root ::= start\nstart ::= "a"', "a"),
        ('root ::= Item\nItem ::= "a" item\nitem ::= "b" ITEM\nITEM ::= "c"', "abc"),
        ('root ::= a-b a_b a_b-2\na-b ::= "x"\na_b ::= "y"\na_b-2 ::= "z"', "xyz"),
        ("root ::= [a-z]{2,3} x{2}\nx ::= [ -~]", "ab~~"),
    ],
)
def test_what_grammars_have(compiler: StructuredOutputCompiler, grammar: str, text: str) -> None:
    definition = definition_of(compiler, pb.StructuredOutput(grammar=grammar))
    assert accepts(definition, text)
    assert not accepts(definition, f"{text} ")


@pytest.mark.filterwarnings("ignore:Possible")
@pytest.mark.parametrize(
    "found", ["[a&&b]", "[+--]", "[--/]", "[a-c--0]", "[~~a]", "[^&&~]", "[a-]"]
)
def test_sets_of_characters_have_no_operators(
    compiler: StructuredOutputCompiler, found: str
) -> None:
    definition = definition_of(compiler, pb.StructuredOutput(grammar=f"root ::= {found}"))
    for character in map(chr, range(32, 127)):
        assert accepts(definition, character) == bool(re.search(found, character)), character


@pytest.mark.timeout(20)
def test_names_are_distinguished_in_linear_time() -> None:
    rules = "".join(f'\na{at:015b} ::= "a"' for at in range(700))
    assert grammar_to_lark('root ::= "a"' + rules.translate(str.maketrans("01", "-_"))).text


def test_many_rules_are_refused() -> None:
    rules = "".join(f'\nr{at} ::= "a" r{at + 1}' for at in range(2000))
    with pytest.raises(
        FormatError, match="has 2001 rules with 6002 names, texts and sets; their pr"
    ):
        grammar_to_lark(f"root ::= r0{rules}")

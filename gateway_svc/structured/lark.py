"""Formats as grammars in the syntax of Lark, which the library reads."""

import json
import re
from collections import Counter
from typing import Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from gateway_svc.structured.ebnf import prepared_ebnf
from gateway_svc.structured.errors import FormatError
from gateway_svc.structured.lark_source import LarkSource, read_lark
from gateway_svc.structured.patterns import ends_in_backslash, num_quantifiers

_ASCII_CLASSES: Final = "dw"
# Spaces of one line only: from each of many empty lines, all others would be read.
_EBNF_RULE: Final = re.compile(r"^[ \t]*[A-Za-z][\w-]*\s*::=", re.MULTILINE)


def quoted(text: str) -> str:
    """A text in a grammar. The library reads U+007F as an escape only."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def grammar_to_lark(grammar: str) -> LarkSource:
    """A grammar in Lark's syntax, or in EBNF (GBNF), converted."""
    if not _EBNF_RULE.search(grammar):
        return read_lark(grammar)
    prepared = prepared_ebnf(grammar)
    try:
        converted = str(gbnf_to_lark(prepared))
    except RecursionError as error:
        raise FormatError("is nested too deeply") from error
    except Exception as error:
        # The converter's errors are of no common class.
        raise FormatError(f"is refused as EBNF: {error!s:.300}") from error
    return read_lark(converted)


def regex_to_lark(pattern: str) -> LarkSource:
    """A grammar of one rule, `start`, that is this regular expression. As in JavaScript, the
    classes of digits and word characters have those of ASCII. FormatError if it is refused."""
    if ends_in_backslash(pattern):
        raise FormatError("ends in a backslash that escapes nothing; remove or double it")
    text = f"start: /{llguidance.regex_to_lark(pattern, _ASCII_CLASSES)}/"
    return LarkSource(text, Counter({"": num_quantifiers(pattern)}))


def choice_to_lark(texts: list[str]) -> LarkSource:
    """One terminal, because a rule has at most 2,000 options."""
    if not texts:
        raise FormatError("has no texts")
    return LarkSource("start: TEXT\nTEXT: " + " | ".join(map(quoted, texts)))

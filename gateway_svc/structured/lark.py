"""Grammars in the syntax of Lark, which the library reads."""

import json
import re
from typing import Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

_ASCII_CLASSES: Final = "dw"
# The time to compile a regular expression grows with the square of what it may repeat or leave out,
# and nothing ends it: 1,000 take up to 0.3 s.
MAX_QUANTIFIERS: Final = 1000
_QUANTIFIER: Final = re.compile(r"[?*+]|\{\d|\|\)|\(\|")
_EBNF_RULE: Final = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)


class SyntaxRefusedError(ValueError):
    """A grammar or regular expression that is refused; the message has the reason."""


def num_quantifiers(pattern: str) -> int:
    """How many parts of a regular expression or grammar may repeat or be absent."""
    return len(_QUANTIFIER.findall(pattern))


def to_lark(grammar: str) -> str:
    """A grammar in Lark's syntax, unchanged, or in EBNF (GBNF), converted."""
    _check_quantifiers(grammar)
    if not _EBNF_RULE.search(grammar):
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except RecursionError as error:
        raise SyntaxRefusedError("is nested too deeply") from error
    except Exception as error:
        # The converter's errors are of no common class.
        raise SyntaxRefusedError(f"is refused as EBNF: {error}") from error


def regex_to_lark(pattern: str) -> str:
    """A grammar of one rule, `start`, that is this regular expression. As in JavaScript, the
    classes of digits and word characters have those of ASCII."""
    _check_quantifiers(pattern)
    return f"start: /{llguidance.regex_to_lark(pattern, _ASCII_CLASSES)}/"


def choice_to_lark(texts: list[str]) -> str:
    """One terminal, because a rule has at most 2,000 options."""
    return "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, texts))


def _check_quantifiers(pattern: str) -> None:
    found = num_quantifiers(pattern)
    if found > MAX_QUANTIFIERS:
        raise SyntaxRefusedError(f"has {found} quantifiers; at most {MAX_QUANTIFIERS} are allowed")

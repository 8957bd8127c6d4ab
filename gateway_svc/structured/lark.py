"""Grammars in the syntax of Lark, which the library reads."""

import json
import re
from typing import Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

_ASCII_CLASSES: Final = "dw"
_EBNF_RULE: Final = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)


class SyntaxRefusedError(ValueError):
    """A grammar in EBNF that cannot be read; the message has the reason."""


def to_lark(grammar: str) -> str:
    """A grammar in Lark's syntax, unchanged, or in EBNF (GBNF), converted."""
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
    return f"start: /{llguidance.regex_to_lark(pattern, _ASCII_CLASSES)}/"


def choice_to_lark(texts: list[str]) -> str:
    """One terminal, because a rule has at most 2,000 options."""
    return "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, texts))

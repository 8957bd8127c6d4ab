"""Grammars in EBNF as the library's converter reads them well. Pure."""

import re
from collections.abc import Mapping
from typing import Final

from gateway_svc.structured.errors import FormatError

# The converter may read all parts again for each rule: this many take up to a second.
_MAX_READ: Final = 2_000_000
_TOKEN: Final = re.compile(
    r"""
      (?P<gap>(?:\s|\#[^\r\n]*)+)(?P<bar>\|)?
    | (?P<text>"(?:\\.|[^"\\])*")
    | (?P<set>\[(?:\\.|[^\]\\])*\])
    | (?P<count>\{[^}]*\})
    | (?P<name>[\w-]+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_RULE: Final = re.compile(r"^[ \t]*([\w-]+)\s*::=", re.MULTILINE)
_ESCAPE: Final = re.compile(r"\\(?:u([\da-fA-F]{4})|U([\da-fA-F]{8})|.)", re.DOTALL)
_ONE_OF_SET: Final = re.compile(r"\\(?:x[\da-fA-F]{2}|.)|.", re.DOTALL)
# To the library, pairs of these are operators of sets.
_OPERATORS: Final = frozenset("&~-")
_SURROGATES: Final = range(0xD800, 0xE000)
_ROOT: Final = "root"
# What the converter calls it.
_START: Final = "start"


def prepared_ebnf(grammar: str) -> str:
    """The grammar with escapes, names and line ends that the converter reads: it loses the zeros of
    `\\u0041`, takes `Item` and `item` for one rule, and ends a rule where a line does, even if the
    next one begins with `|`. FormatError for one that takes it long."""
    names = _names(grammar)
    tokens = [*_TOKEN.finditer(grammar)]
    num_parts = sum(token.lastgroup in ("text", "set", "name") for token in tokens)
    if len(names) * num_parts > _MAX_READ:
        raise FormatError(
            f"has {len(names)} rules with {num_parts} names, texts and sets; their product may be "
            f"at most {_MAX_READ} in EBNF; use fewer, or Lark's syntax"
        )
    return "".join(_written(token, names) for token in tokens)


def _written(token: re.Match[str], names: Mapping[str, str]) -> str:
    if token["bar"]:
        return f"|{token['gap']}"
    if token["text"]:
        return _ESCAPE.sub(lambda found: _character(found, is_text=True), token[0])
    if token["set"]:
        return _set(_ESCAPE.sub(lambda found: _character(found, is_text=False), token[0]))
    return names.get(token[0], token[0]) if token["name"] else token[0]


def _set(written: str) -> str:
    """A set of characters without operators. A mark between two characters is that of a range."""
    begin = "[^" if written.startswith("[^") else "["
    ones = _ONE_OF_SET.findall(written[len(begin) : -1])
    parts, at = [begin], 0
    while at < len(ones):
        is_range = at + 2 < len(ones) and ones[at + 1] == "-"
        ends = (ones[at], ones[at + 2]) if is_range else (ones[at],)
        parts.append("-".join(f"\\x{ord(one):02x}" if one in _OPERATORS else one for one in ends))
        at += 3 if is_range else 1
    return "".join(parts) + "]"


def _character(escape: re.Match[str], is_text: bool) -> str:
    """Of ASCII in a form that is no other mark."""
    if is_text and escape[0] in (r"\[", r"\]"):
        return escape[0][1]
    digits = escape[1] or escape[2]
    number = int(digits, 16) if digits else -1
    if number not in range(0x110000) or number in _SURROGATES:
        return escape[0]
    return f"\\x{number:02x}" if number < 0x80 else chr(number)


def _names(grammar: str) -> dict[str, str]:
    """Other names for rules that the converter would take for one."""
    found: dict[str, str] = {}
    used = {_kind(_START)}
    defined = dict.fromkeys(_RULE.findall(grammar))
    kinds = {_kind(name) for name in defined}
    number = 1
    for name in defined:
        found[name] = name
        while name != _ROOT and _kind(found[name]) in used:
            number += 1
            other = f"{name}-{number}"
            found[name] = name if _kind(other) in kinds else other
        used.add(_kind(found[name]))
    return found


def _kind(name: str) -> str:
    return name.replace("-", "_").upper()

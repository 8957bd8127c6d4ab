"""Regular expressions: how much of them repeats, and what the library misreads. Pure."""

import re
from functools import lru_cache
from typing import Final

# The time to compile a regular expression grows with the square of what it may repeat or leave out,
# and nothing ends it: 1,000 take up to 0.3 s.
MAX_QUANTIFIERS: Final = 1000
_QUANTIFIER: Final = re.compile(r"[?*+]|\{\d|\|\)|\(\|")
# Python does not know properties of characters.
_UNREAD: Final = re.compile(r"\\[pPuU]")
_PROPERTY: Final = re.compile(r"\\[pP](\{[^}]{0,99}\}|.)", re.DOTALL)
_WITHOUT_NUL: Final = r"[{}&&[^\x00]]"
# A set is everything up to a bracket; one in front is one of the set.
_SET: Final = re.compile(r"\[(\^?+)(\]?+(?:\\.|[^\\\]])*)\]", re.DOTALL)
_ONE_OF_SET: Final = re.compile(
    r"\\(?:[xupP]\{[^}]{0,99}\}|x[\da-fA-F]{2}|u[\da-fA-F]{4}|[pP].|.)|.", re.DOTALL
)
_SEVERAL: Final = ("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\p", "\\P")
# Of these, some pairs are operators to the library, or will be to Python.
_ESCAPED: Final = frozenset("[]&~-^|")
# Characters of a set without classes, properties, code points and operators.
_PLAIN: Final = r"""A-Za-z0-9 _.,;:!?'"/+*=<>(){}|@#%$"""
# What is certain to be read as the library reads it.
_PART: Final = re.compile(
    rf"""
      (?P<open>\((?:\?:)?(?!\?))
    | (?P<close>\))
    | (?P<several>\.|\\[dDwWsS]|\[\^(?:\\[nrt\\\]\["/-]|[{_PLAIN}]|-(?!-))+\])
    | (?P<set>\[(?:\\[nrt\\\]\["/-]|[{_PLAIN}]|-(?!-))+\])
    | (?P<unlimited>[*+]|\{{\d+,\}})
    | \?|\{{\d*[1-9]\d*\}}|\{{\d+,\d*[1-9]\d*\}}
    | (?P<one>[^\\\[\]{{}}()^$]|\\[nrt\\\]\["'/.*+?(){{}}|^$<>#%&~=!:;,@_ -])
    """,
    re.VERBOSE | re.DOTALL,
)


def num_quantifiers(pattern: str) -> int:
    """How many parts of a regular expression may repeat or be absent."""
    return len(_QUANTIFIER.findall(pattern))


def may_repeat_one_text(pattern: str) -> bool:
    """Whether some part of a regular expression may repeat without a limit although no place in it
    has a choice of characters, as in `a+` or `(ab)*`. Also if that is not certain: for flags,
    anchors, other escapes and sets, and what may occur zero times at most."""
    # Whether a place has a choice: of the open groups, the innermost at the end, and the last part.
    groups, has_choice = [False], False
    at = 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None or (part["close"] and len(groups) == 1):
            return True
        if part["unlimited"]:
            if not has_choice:
                return True
        elif part["open"]:
            groups.append(False)
            has_choice = False
        elif part["close"]:
            has_choice = groups.pop()
        elif part["several"]:
            has_choice = True
        elif part["set"]:
            has_choice = len(_characters(part["set"])) > 1
        elif part["one"]:
            has_choice = False
        groups[-1] |= has_choice
        at = part.end()
    return len(groups) > 1


def _characters(plain_set: str) -> set[str]:
    """Those that are in it for certain: the ends of ranges, but no mark between them."""
    ones = re.findall(r"\\.|[^-\\]", plain_set[1:-1])
    return {one if one in (r"\n", r"\r", r"\t") else one[-1] for one in ones}


def ends_in_backslash(pattern: str) -> bool:
    """Whether the last backslash of a regular expression escapes nothing, which the library
    ignores."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def of_schema(pattern: str) -> str:
    """The pattern of a schema as the library reads it well. A set of characters has only those that
    are written in it, as in ECMAScript, and no sets or operators.

    llguidance 1.9 quotes a set of all control characters as if it had `"` and the backslash, so
    that `[^"]` matches a quotation mark. Without U+0000 it quotes one by one.
    """
    written: list[str] = []
    at = 0
    while at < len(pattern):
        end = at + (2 if pattern[at] == "\\" else 1)
        if found := _SET.match(pattern, at):
            shown = f"[{found[1]}{_escaped(found[2])}]"
            written.append(_WITHOUT_NUL.format(shown) if _is_misread(shown) else shown)
            end = found.end()
        elif found := _PROPERTY.match(pattern, at):
            written.append(_WITHOUT_NUL.format(found[0]))
            end = found.end()
        elif pattern[at] == "[":
            # A set without an end, which the library refuses.
            return pattern
        else:
            written.append(pattern[at:end])
        at = end
    return "".join(written)


def _escaped(characters: str) -> str:
    """What is between the brackets of a set, with escapes where the library reads operators."""
    ones = _ONE_OF_SET.findall(characters)
    written: list[str] = []
    at = 0
    while at < len(ones):
        is_range = at + 2 < len(ones) and ones[at + 1] == "-"
        ends = (ones[at], ones[at + 2]) if is_range else (ones[at],)
        if is_range and any(end.startswith(_SEVERAL) for end in ends):
            # The mark stands for itself.
            written += [_escaped_one(ones[at]), r"\-"]
            at += 2
        else:
            written.append("-".join(map(_escaped_one, ends)))
            at += 3 if is_range else 1
    return "".join(written)


def _escaped_one(one: str) -> str:
    if one == r"\b":
        return r"\x08"
    return f"\\{one}" if one in _ESCAPED else one


@lru_cache(1024)
def _is_misread(found: str) -> bool:
    """Whether a set has U+0000 and lacks one of the two, as far as that is known."""
    if _UNREAD.search(found):
        return True
    try:
        matches = re.compile(found, re.ASCII).match
    except (re.error, OverflowError, RecursionError):
        # The library refuses it, or knows more escapes.
        return True
    return bool(matches("\0")) and not (matches('"') and matches("\\"))

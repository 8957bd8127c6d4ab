"""Regular expressions: how much of them repeats, and what the library misreads. Pure."""

import re
from functools import lru_cache
from typing import Final

# The time to compile a regular expression grows with the square of what it may repeat or leave out,
# and nothing ends it: 1,000 take up to 0.3 s.
MAX_QUANTIFIERS: Final = 1000
_QUANTIFIER: Final = re.compile(r"[?*+]|\{\d|\|\)|\(\|")
# Python reads these otherwise than the library: sets within sets, and properties of characters.
_UNREAD: Final = re.compile(r"\[|&&|~~|--|\|\||\\[pPuU]")
_PROPERTY: Final = re.compile(r"\\[pP](\{[^}]*\}|.)", re.DOTALL)
_WITHOUT_NUL: Final = r"[{}&&[^\x00]]"


def num_quantifiers(pattern: str) -> int:
    """How many parts of a regular expression may repeat or be absent."""
    return len(_QUANTIFIER.findall(pattern))


def without_nul(pattern: str) -> str:
    """The expression with U+0000 taken out of sets of characters that lack `"` or a backslash.

    llguidance 1.9 quotes a set of all control characters as if it had both, so that `[^"]` matches
    a quotation mark. Without U+0000 it quotes one by one.
    """
    written: list[str] = []
    at = 0
    while at < len(pattern):
        if pattern[at] == "[":
            end = _end_of_set(pattern, at)
            if end is None:
                # The library refuses it.
                return pattern
            found = pattern[at:end]
            written.append(_WITHOUT_NUL.format(found) if _is_misread(found) else found)
        elif property_ := _PROPERTY.match(pattern, at):
            end = property_.end()
            written.append(_WITHOUT_NUL.format(property_[0]))
        else:
            end = at + (2 if pattern[at] == "\\" else 1)
            written.append(pattern[at:end])
        at = end
    return "".join(written)


def _end_of_set(pattern: str, start: int) -> int | None:
    """The position behind the set that begins at `start`, with the sets within it; None if it has
    no end."""
    depth, at = 0, start
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            # A bracket in front is one of the set.
            first = next((one for one in ("^]", "]") if pattern.startswith(one, at + 1)), "")
            at += len(first)
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return None


@lru_cache(1024)
def _is_misread(found: str) -> bool:
    """Whether a set has U+0000 and lacks one of the two, as far as that is known."""
    if _UNREAD.search(found[1:]):
        return True
    try:
        matches = re.compile(found, re.ASCII).match
    except (re.error, OverflowError, RecursionError):
        # The library refuses it, or knows more escapes.
        return True
    return bool(matches("\0")) and not (matches('"') and matches("\\"))

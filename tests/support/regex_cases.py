"""Regular expressions and grammars, for tests of structured output."""

import random

_ATOMS = (
    "a",
    "xy",
    "é",
    r"\.",
    r"\d",
    r"\w",
    "[a-f]",
    "[^0-9]",
    "[A-Za-z_]",
    " ",
    "-",
    '"',
    "/",
    "😀",
)
_MARKS = ("", "", "", "?", "+", "*", "{2}", "{1,3}", "{0,2}")


def regexes(count: int, seed: int = 0) -> list[str]:
    """Expressions that Python and the grammar library read alike."""
    generator = random.Random(seed)
    return [_alternatives(generator, depth=2) for _ in range(count)]


def _alternatives(r: random.Random, depth: int) -> str:
    return "|".join(_sequence(r, depth) for _ in range(r.choice((1, 1, 2, 3))))


def _sequence(r: random.Random, depth: int) -> str:
    parts = []
    for _ in range(r.randrange(1, 5)):
        if depth and r.random() < 0.3:
            atom = f"(?:{_alternatives(r, depth - 1)})"
            parts.append(atom + r.choice(("", "?", "{1,2}")))
        else:
            atom = r.choice(_ATOMS)
            parts.append(
                (atom if len(atom) == 1 or atom[0] in "\\[" else f"({atom})") + r.choice(_MARKS)
            )
    return "".join(parts)


# In the syntax that the grammar library and the package `lark` share.
GRAMMARS = (
    'start: "a" start "b" | "c"',
    'start: expr\nexpr: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" expr ")"',
    'start: item ("," item)*\nitem: /[a-z]{1,4}/ "=" /[0-9]{1,3}/',
    'start: "select " NAME " from " NAME (" where " NAME " = " NUM)?\n'
    "NAME: /[a-z]{1,6}/\nNUM: /[0-9]{1,4}/",
    "start: (LETTER DIGIT)~2..4\nLETTER: /[A-F]/\nDIGIT: /[0-9]/",
    'start: "[" [value ("," value)*] "]"\nvalue: start | "1" | "0"',
    'start: "<" NAME ">" body "</x>"\nNAME: /[a-z]{1,3}/\nbody: /[^<>]{1,10}/ | start',
    'start: "yes" | "no" | "maybe " ("later" | "never")',
    'start: row+\nrow: /[0-9]{1,2}/ ";" /[0-9]{1,2}/ "\\n"',
    'start: "if " cond " then " word (" else " word)?\ncond: word " == " word\nword: /[a-z]{1,5}/',
    'start: "\\"" /[^"\\\\\\x00-\\x1f]{1,12}/ "\\""',
    'start: a~3 b?\na: "x" | "yz"\nb: "!" b?',
    'start: "{" pair? "}"\npair: "k" ":" (start | "v")',
    'start: greeting ", " NAME "!"\ngreeting: "Hello" | "Hi"\nNAME: /[A-Z][a-z]{0,8}/',
    'start: /v[0-9]/ "." /[0-9]{1,2}/ ("." /[0-9]{1,2}/)?',
    'start: ("(" start ")")*',
    'start: move (" " move)~0..5\nmove: /[a-h][1-8]/ "-" /[a-h][1-8]/',
    'start: "é" "😀"~1..3 | "größe " /[0-9]+/',
    "start: hex~2..6\nhex: /[0-9a-f]{2}/",
    'start: "-"? ("0" | /[1-9][0-9]{0,5}/) ("." /[0-9]{1,4}/)?',
)

"""Vocabulary: the glossary's terms are used, and words that were replaced are not."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("protos", "gateway_svc", "scheduler_svc", "worker_svc", "kernels", "quire")
FOLDERS = (*PRODUCT, ".github", "benchmarks", "demo", "docs", "examples", "scripts", "tests")
SUFFIXES = {".py", ".lua", ".cpp", ".h", ".proto", ".md", ".yml", ".yaml", ".toml", ".sh"}
GENERATED = ("quire/v1", "quire/internal")
# The changelog has to name what was renamed.
EXCEPT = {Path(__file__), ROOT / "CHANGELOG.md"}
MAX_TERMS = 30
# A pattern of words, and the word that stands in their place.
REPLACED = {
    "reigns?": "term",
    "tenures?": "lease",
    "estates?": "recovered state",
    "patience|(?:im)?patients?": "retry policy, unary, deferred delivery",
    "company|companies": "batch window",
    "rosters?": "sequence table",
    "arriving": "admission",
    "leaving": "release",
    "trials?": "quarantine",
    "former pools?": "detached pools",
    "fold(?:s|ed|ing)?": "journal compaction",
    "flights?": "in-flight step",
    "land(?:s|ed|ing)?": "complete",
    "tells?|told|telling": "deliver",
    "settle(?:s|d)?|settling": "release",
    "desks?": "request handler",
    "gathering": "token buffer",
    "outbox(?:es)?": "send queue",
    "answers?": "responses",
    "turns?": "attachment generation, GPU lock",
    "crews?": "thread pool",
    "tether(?:s|ed)?": "parent-death signal",
    "judg(?:es?|ed|ing)": "filter",
    "short pass(?:es)?": "fused forward",
    "whoever|somebody|nobody|everybody|anybody": "a component",
}
# Uses of such words by the field and by Python.
_FIELD = re.compile(
    r"in[ _-]?flight|multi-turn|end_turn|end_of_turn|thinking_turns|draft-0|\.tell\(\)",
    re.IGNORECASE,
)
_CASE_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NO_LETTER = re.compile(r"[^A-Za-z\n]+")
_BANNED = {re.compile(rf"\b(?:{words})\b"): instead for words, instead in REPLACED.items()}
# Most texts have none, and are searched once for all.
_ANY_BANNED = re.compile(rf"\b(?:{'|'.join(REPLACED)})\b")


@dataclass(frozen=True)
class Term:
    """A row of the glossary."""

    name: str
    meaning: str
    module: str


def _glossary() -> list[Term]:
    section = (
        (ROOT / "ARCHITECTURE.md").read_text().partition("## Glossary\n")[2].partition("\n## ")
    )
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \| `(.+?)` \|$", section[0], re.MULTILINE)
    return [Term(*row) for row in rows]


def _plain(text: str) -> str:
    """The words of each line, those inside identifiers too, in lower case and one space apart."""
    return _NO_LETTER.sub(" ", _CASE_BORDER.sub(" ", text)).lower()


def _texts() -> Iterator[tuple[str, str]]:
    """Path and content of each text of the repository."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    for path in [*sorted(ROOT.iterdir()), *files]:
        name = path.relative_to(ROOT).as_posix()
        named = path.suffix in SUFFIXES or path.name in ("Makefile", "Dockerfile")
        if named and path.is_file() and path not in EXCEPT and not name.startswith(GENERATED):
            yield name, path.read_text()


def test_the_glossary_is_short() -> None:
    terms = _glossary()
    assert 0 < len(terms) <= MAX_TERMS
    assert len({term.name for term in terms}) == len(terms)


@pytest.mark.parametrize("term", _glossary(), ids=lambda term: term.name)
def test_a_term_is_used_where_the_glossary_says(term: Term) -> None:
    assert _plain(term.name) in _plain((ROOT / term.module).read_text())


def test_replaced_words_are_gone() -> None:
    """From names, comments, messages and documents."""
    found = []
    for name, text in _texts():
        plain = _plain(_FIELD.sub("", f"{name}\n{text}"))
        if _ANY_BANNED.search(plain):
            found += [
                f"{name}:{number}: {word} (use {instead})"
                for number, line in enumerate(plain.split("\n"))
                for banned, instead in _BANNED.items()
                for word in banned.findall(line)
            ]
    assert found == []

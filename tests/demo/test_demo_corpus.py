import os
import subprocess
import sys

import pytest

from demo.corpus import MAX_DOCUMENT_CHARS, collect_documents, digest, split_documents


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return collect_documents()


@pytest.mark.slow
def test_another_process_collects_the_same_corpus(documents: list[str]) -> None:
    script = "from demo.corpus import *; print(digest(collect_documents()))"
    other = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest(documents)


@pytest.mark.slow
def test_documents_are_many_distinct_and_short(documents: list[str]) -> None:
    assert len(documents) > 3000
    assert len(set(documents)) == len(documents)
    assert max(map(len, documents)) <= MAX_DOCUMENT_CHARS


@pytest.mark.slow
def test_documents_hold_prose_and_no_examples(documents: list[str]) -> None:
    assert not [document for document in documents if ">>>" in document or "  " in document]
    assert all(document.isascii() for document in documents)


def test_the_digest_differs_between_documents() -> None:
    assert digest(["ab", "c"]) != digest(["a", "bc"])


def test_wrapped_lines_become_one_and_paragraphs_stay_together() -> None:
    text = "Return the first\nitem of a list.\n\nThe list is not\nchanged by this."
    assert list(split_documents(text)) == [
        "Return the first item of a list.\n\nThe list is not changed by this."
    ]


def test_long_texts_are_cut_between_paragraphs() -> None:
    paragraph = "word " * 79 + "word."
    assert list(split_documents(f"{paragraph}\n\n{paragraph}")) == [paragraph, paragraph]


@pytest.mark.parametrize(
    "paragraph",
    [
        ">>> sorted([3, 1, 2])",
        "name      the name of the file\nmode      how to open it",
        "The items are:\n  first this\n  then that",
        "Section One\n-----------",
        "x = [0, 1, 2, 3, 4, 5, 6, 7]",
        "two words",
        "It says na\u00efve, which is not ASCII.",
    ],
)
def test_what_is_not_prose_is_dropped(paragraph: str) -> None:
    assert list(split_documents(f"Return the value.\n\n{paragraph}")) == ["Return the value."]

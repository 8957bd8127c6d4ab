import pytest
from tokenizers import Tokenizer

from demo.evaluate import PROMPTS, Continuation, Evaluation, longest_copy, measure, report, words_of
from demo.train import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["Return the value of a file.", "Close the file."], 300)


def test_there_are_fifty_different_prompts() -> None:
    assert len(set(PROMPTS)) == 50


def test_a_word_is_a_run_of_letters_as_spelt() -> None:
    assert words_of("Don't call read_line2() twice") == [
        *("Don", "t", "call", "read", "line", "twice"),
    ]


@pytest.mark.parametrize(
    ("texts", "corpus", "length"),
    [
        ([[1, 2, 3, 4]], [[9, 2, 3, 9]], 2),
        ([[1, 2, 3]], [[1, 2, 3]], 3),
        ([[1, 2], [3, 4]], [[2, 3]], 1),
        ([[1, 2]], [[3, 4]], 0),
    ],
)
def test_the_longest_copy_lies_within_one_text_and_one_document(
    texts: list[list[int]], corpus: list[list[int]], length: int
) -> None:
    assert longest_copy(texts, corpus) == length


def test_measuring_counts_written_words_and_not_the_prompt(tokenizer: Tokenizer) -> None:
    continuations = [
        Continuation("Frobnicate", " the file.", ended=True),
        Continuation("Close", " the glorp glorp", ended=False),
    ]
    measured = measure(continuations, ["Return the file."], tokenizer)
    assert measured.known_words == 3 / 5
    assert measured.words == 5
    assert measured.ended == 0.5


def test_a_copy_may_begin_in_the_prompt(tokenizer: Tokenizer) -> None:
    document = "Return the value of a file."
    measured = measure([Continuation("Return", document[6:], ended=True)], [document], tokenizer)
    assert measured.longest_copy == len(tokenizer.encode(document).ids)


@pytest.mark.parametrize(
    ("known_words", "ended", "longest", "passes"),
    [
        (0.9, 0.8, 49, True),
        (0.89, 0.8, 49, False),
        (0.9, 0.78, 49, False),
        (0.9, 0.8, 50, False),
    ],
)
def test_every_bound_binds(known_words: float, ended: float, longest: int, passes: bool) -> None:
    evaluation = Evaluation(known_words, ended, longest, words=100, tokens=150)
    assert evaluation.passes() is passes


def test_the_report_names_each_figure_and_its_bound() -> None:
    lines = report(Evaluation(0.955, 0.9, 31, words=100, tokens=150)).splitlines()
    assert [line.split()[-3:] for line in lines[1:]] == [
        ["95.5%", ">=", "90%"],
        ["90%", ">=", "80%"],
        ["31", "<", "50"],
    ]

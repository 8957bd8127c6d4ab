"""A stream is judged token by token, character by character."""

import pytest

from benchmarks.chaos.comparison import Comparison, Verdict
from quire.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput, Usage

TOKENS = [11, 12, 13, 14]
EXPECTED = RequestOutput(
    request_id="a",
    model="m",
    prompt="p",
    prompt_token_ids=None,
    outputs=[
        CompletionOutput(0, "abcdefgh", TOKENS, "length", None),
        CompletionOutput(1, "xy", [7], "stop", 7),
    ],
    usage=Usage(prompt_tokens=3, cached_prompt_tokens=0, completion_tokens=5),
)
# How the second choice comes, and the end of it all.
SECOND = CompletionDelta(1, "xy", 0, [7], "stop", 7)
LAST = RequestDelta("a", "m", [], EXPECTED.usage)


def delta(first: int, tokens: list[int], text: str, finish: str | None = None) -> RequestDelta:
    return message(CompletionDelta(0, text, first, tokens, finish, None))


def message(*deltas: CompletionDelta, usage: Usage | None = None) -> RequestDelta:
    return RequestDelta("a", "m", list(deltas), usage)


def judged(*messages: RequestDelta, ends: bool = True) -> list[tuple[Verdict, str]]:
    comparison = Comparison(EXPECTED)
    for one in messages:
        comparison.take(one)
    if ends:
        comparison.end()
    return [(finding.verdict, finding.said) for finding in comparison.findings]


def verdicts(*messages: RequestDelta, ends: bool = True) -> list[Verdict]:
    return [verdict for verdict, _ in judged(*messages, ends=ends)]


def test_what_was_expected_passes_in_whatever_pieces_it_comes():
    pieces = [
        message(),
        delta(0, [11], ""),
        delta(1, [12, 13], "abcd"),
        message(SECOND),
        delta(3, [14], "efgh", "length"),
        LAST,
    ]
    assert judged(*pieces) == []
    whole = CompletionDelta(0, "abcdefgh", 0, TOKENS, "length", None)
    assert judged(message(whole, SECOND, usage=EXPECTED.usage)) == []


def test_text_and_end_may_come_without_tokens():
    pieces = [delta(0, TOKENS, ""), delta(4, [], "abcdefgh"), message(SECOND)]
    assert judged(*pieces, delta(0, [], "", "length"), LAST) == []


def test_a_gap_is_lost_tokens():
    assert judged(delta(0, [11], "ab"), delta(2, [13], "cd"), ends=False) == [
        (Verdict.LOST, "choice 0: tokens 1 to 1")
    ]


def test_tokens_that_come_again_are_repeated():
    assert judged(delta(0, [11, 12], "ab"), delta(1, [12, 13], "cd"), ends=False) == [
        (Verdict.REPEATED, "choice 0: tokens from 1, 2 had come")
    ]


def test_another_token_or_text_is_changed():
    assert judged(delta(0, [11, 99, 98], "abX"), ends=False) == [
        (Verdict.CHANGED, "choice 0: token 1: 99, expected 12"),
        (Verdict.CHANGED, "choice 0: text from 0: 'abX', expected 'abc'"),
    ]


def test_text_that_comes_again_is_seen():
    assert verdicts(delta(0, [11], "ab"), delta(1, [12], "bcd"), ends=False) == [Verdict.CHANGED]


def test_more_than_there_should_be_is_changed():
    found = judged(delta(0, [*TOKENS, 15], "abcdefgh"), ends=False)
    assert found == [(Verdict.CHANGED, "choice 0: token 4: 15, expected None")]
    assert verdicts(delta(0, TOKENS, "abcdefghi"), ends=False) == [Verdict.CHANGED]
    third = CompletionDelta(2, "", 0, [1], None, None)
    assert verdicts(message(third), ends=False) == [Verdict.CHANGED]


def test_an_end_before_everything_has_come_is_lost():
    assert judged(delta(0, [11], "ab"), message(SECOND)) == [
        (Verdict.LOST, "choice 0: the end"),
        (Verdict.LOST, "choice 0: tokens from 1 of 4"),
        (Verdict.LOST, "choice 0: text from 2 of 8"),
        (Verdict.LOST, "usage"),
    ]


def test_a_client_that_left_misses_nothing():
    assert judged(delta(0, [11], "ab"), ends=False) == []


@pytest.mark.parametrize(
    "extra", [delta(4, [], "", "length"), delta(4, [], ""), message(SECOND), LAST]
)
def test_nothing_comes_after_the_end(extra: RequestDelta):
    pieces = [delta(0, TOKENS, "abcdefgh", "length"), message(SECOND)]
    assert Verdict.REPEATED in verdicts(*pieces, LAST, extra)


def test_ends_and_counts_are_compared():
    early = CompletionDelta(1, "xy", 0, [7], "length", None)
    usage = Usage(prompt_tokens=3, cached_prompt_tokens=2, completion_tokens=6)
    found = judged(delta(0, TOKENS, "abcdefgh", "length"), message(early), message(usage=usage))
    assert found == [
        (Verdict.CHANGED, "choice 1: finish_reason: 'length', expected 'stop'"),
        (Verdict.CHANGED, "choice 1: stop_reason: None, expected 7"),
        (Verdict.CHANGED, "usage: completion_tokens 6, expected 5"),
    ]


def test_an_error_is_a_failure_and_tokens_are_counted():
    comparison = Comparison(EXPECTED)
    comparison.take(message(CompletionDelta(0, "ab", 0, [11, 12], None, None), SECOND))
    comparison.fail("UNAVAILABLE: gone")
    assert comparison.num_tokens == 3
    [finding] = comparison.findings
    assert (finding.verdict, finding.said) == (Verdict.FAILED, "UNAVAILABLE: gone")

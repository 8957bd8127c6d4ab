"""Comparison of a stream with its reference, token by token and character by character."""

import pytest

from benchmarks.chaos.comparison import Comparison, Verdict
from quire.client.outputs import (
    CompletionDelta,
    CompletionOutput,
    RequestDelta,
    RequestOutput,
    Usage,
)

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
# The second choice in one message, and the last message.
SECOND = CompletionDelta(1, "xy", 0, [7], "stop", 7)
LAST = RequestDelta("a", "m", [], EXPECTED.usage)


def delta(first: int, tokens: list[int], text: str, finish: str | None = None) -> RequestDelta:
    return message(CompletionDelta(0, text, first, tokens, finish, None))


def message(*deltas: CompletionDelta, usage: Usage | None = None) -> RequestDelta:
    return RequestDelta("a", "m", list(deltas), usage)


def findings_of(*messages: RequestDelta, ends: bool = True) -> list[tuple[Verdict, str]]:
    comparison = Comparison(EXPECTED)
    for one in messages:
        comparison.take(one)
    if ends:
        comparison.end()
    return [(finding.verdict, finding.message) for finding in comparison.findings]


def verdicts(*messages: RequestDelta, ends: bool = True) -> list[Verdict]:
    return [verdict for verdict, _ in findings_of(*messages, ends=ends)]


def test_the_expected_output_passes_however_it_is_split():
    pieces = [
        message(),
        delta(0, [11], ""),
        delta(1, [12, 13], "abcd"),
        message(SECOND),
        delta(3, [14], "efgh", "length"),
        LAST,
    ]
    assert findings_of(*pieces) == []
    whole = CompletionDelta(0, "abcdefgh", 0, TOKENS, "length", None)
    assert findings_of(message(whole, SECOND, usage=EXPECTED.usage)) == []


def test_text_and_finish_reason_may_arrive_without_tokens():
    pieces = [delta(0, TOKENS, ""), delta(4, [], "abcdefgh"), message(SECOND)]
    assert findings_of(*pieces, delta(0, [], "", "length"), LAST) == []


def test_a_gap_is_lost_tokens():
    assert findings_of(delta(0, [11], "ab"), delta(2, [13], "cd"), ends=False) == [
        (Verdict.LOST, "choice 0: tokens 1 to 1")
    ]


def test_an_overlap_is_repeated_tokens():
    assert findings_of(delta(0, [11, 12], "ab"), delta(1, [12, 13], "cd"), ends=False) == [
        (Verdict.REPEATED, "choice 0: tokens from 1, 2 were received")
    ]


def test_another_token_or_text_is_changed():
    assert findings_of(delta(0, [11, 99, 98], "abX"), ends=False) == [
        (Verdict.CHANGED, "choice 0: token 1: 99, expected 12"),
        (Verdict.CHANGED, "choice 0: text from 0: 'abX', expected 'abc'"),
    ]


def test_repeated_text_is_changed():
    assert verdicts(delta(0, [11], "ab"), delta(1, [12], "bcd"), ends=False) == [Verdict.CHANGED]


def test_extra_tokens_text_and_choices_are_changed():
    found = findings_of(delta(0, [*TOKENS, 15], "abcdefgh"), ends=False)
    assert found == [(Verdict.CHANGED, "choice 0: token 4: 15, expected None")]
    assert verdicts(delta(0, TOKENS, "abcdefghi"), ends=False) == [Verdict.CHANGED]
    third = CompletionDelta(2, "", 0, [1], None, None)
    assert verdicts(message(third), ends=False) == [Verdict.CHANGED]


def test_an_early_end_is_lost():
    assert findings_of(delta(0, [11], "ab"), message(SECOND)) == [
        (Verdict.LOST, "choice 0: the end"),
        (Verdict.LOST, "choice 0: tokens from 1 of 4"),
        (Verdict.LOST, "choice 0: text from 2 of 8"),
        (Verdict.LOST, "usage"),
    ]


def test_a_cancelled_stream_has_no_findings():
    assert findings_of(delta(0, [11], "ab"), ends=False) == []


@pytest.mark.parametrize(
    "extra", [delta(4, [], "", "length"), delta(4, [], ""), message(SECOND), LAST]
)
def test_a_message_after_the_end_is_repeated(extra: RequestDelta):
    pieces = [delta(0, TOKENS, "abcdefgh", "length"), message(SECOND)]
    assert Verdict.REPEATED in verdicts(*pieces, LAST, extra)


def test_finish_reasons_and_usage_are_compared():
    early = CompletionDelta(1, "xy", 0, [7], "length", None)
    usage = Usage(prompt_tokens=3, cached_prompt_tokens=2, completion_tokens=6)
    found = findings_of(
        delta(0, TOKENS, "abcdefgh", "length"), message(early), message(usage=usage)
    )
    assert found == [
        (Verdict.CHANGED, "choice 1: finish_reason: 'length', expected 'stop'"),
        (Verdict.CHANGED, "choice 1: stop_reason: None, expected 7"),
        (Verdict.CHANGED, "usage: completion_tokens 6, expected 5"),
    ]


def test_an_error_is_failed_and_tokens_are_counted():
    comparison = Comparison(EXPECTED)
    comparison.take(message(CompletionDelta(0, "ab", 0, [11, 12], None, None), SECOND))
    comparison.fail("UNAVAILABLE: gone")
    assert comparison.num_tokens == 3
    [finding] = comparison.findings
    assert (finding.verdict, finding.message) == (Verdict.FAILED, "UNAVAILABLE: gone")

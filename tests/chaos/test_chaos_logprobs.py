"""Comparison of log-probabilities: identical, within the tolerance, or different."""

import pytest

from benchmarks.chaos.comparison import Comparison, Verdict
from benchmarks.chaos.logprobs import same_logprobs
from benchmarks.chaos.mix import Request
from benchmarks.chaos.streams import Reference
from quire.client.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestDelta,
    RequestOutput,
    TokenLogprobs,
    Usage,
)
from quire.client.sampling_params import SamplingParams

TOLERANCE = 1e-3


def logprobs_of(*entries: tuple[int, float, int]) -> TokenLogprobs:
    return {id_: Logprob(logprob, rank, f"t{id_}") for id_, logprob, rank in entries}


# The sampled token is not one of the three most likely ones, the last two of which are close.
BEYOND = logprobs_of((9, -5.0, 6), (1, -1.0, 1), (2, -2.0, 2), (3, -2.0004, 3))
AMONG = logprobs_of((2, -2.0, 2), (1, -1.0, 1), (3, -2.0004, 3))


@pytest.mark.parametrize("tolerance", [0.0, TOLERANCE])
def test_identical_logprobs_are_the_same(tolerance: float):
    for one in (BEYOND, AMONG, logprobs_of((5, -1.5, 4))):
        assert same_logprobs(one, dict(one), tolerance)


@pytest.mark.parametrize(
    "other",
    [
        logprobs_of((9, -5.0, 7), (1, -1.0, 1), (2, -2.0, 2), (3, -2.0004, 3)),
        logprobs_of((9, -5.0005, 6), (1, -1.0, 1), (2, -2.0, 2), (3, -2.0004, 3)),
        logprobs_of((9, -5.0, 6), (1, -1.0, 1), (3, -2.0, 2), (2, -2.0004, 3)),
        # Another token with about the same value is the third.
        logprobs_of((9, -5.0, 6), (1, -1.0, 1), (2, -2.0, 2), (4, -2.0007, 3)),
    ],
)
def test_rounding_is_within_the_tolerance(other: TokenLogprobs):
    assert same_logprobs(BEYOND, other, TOLERANCE)
    assert same_logprobs(other, BEYOND, TOLERANCE)
    assert not same_logprobs(BEYOND, other, 0.0)


def test_a_sampled_token_may_be_among_the_most_likely_in_one_run_only():
    among = logprobs_of((3, -2.0, 3), (1, -1.0, 1), (2, -1.5, 2))
    beyond = logprobs_of((3, -2.0, 4), (1, -1.0, 1), (2, -1.5, 2), (4, -1.9995, 3))
    assert same_logprobs(among, beyond, TOLERANCE)
    assert same_logprobs(beyond, among, TOLERANCE)


@pytest.mark.parametrize("tolerance", [0.0, TOLERANCE])
@pytest.mark.parametrize(
    "other",
    [
        logprobs_of((9, -5.002, 6), (1, -1.0, 1), (2, -2.0, 2), (3, -2.0004, 3)),
        logprobs_of((9, -5.0, 6), (7, -1.0, 1), (2, -2.0, 2), (3, -2.0004, 3)),
        logprobs_of((9, -5.0, 6), (2, -1.0, 1), (1, -2.0, 2), (3, -2.0004, 3)),
        logprobs_of((9, -5.0, 6), (1, -1.0, 1)),
        logprobs_of((9, -5.0, 6)),
        {},
        AMONG,
        {**BEYOND, 1: Logprob(-1.0, 1, "another text")},
    ],
)
def test_more_than_rounding_is_a_difference(other: TokenLogprobs, tolerance: float):
    assert not same_logprobs(BEYOND, other, tolerance)
    assert not same_logprobs(other, BEYOND, tolerance)


TOKENS = [2, 2, 2]
LOGPROBS = [logprobs_of((2, -2.0 - at, 2), (1, -1.0 - at, 1)) for at in range(3)]


def output(logprobs: list[TokenLogprobs]) -> RequestOutput:
    completion = CompletionOutput(0, "abc", TOKENS, "length", None, logprobs)
    return RequestOutput("a", "m", "p", None, [completion], Usage(1, 0, 3))


def findings(
    expected: list[TokenLogprobs], *pieces: list[TokenLogprobs], tolerance: float = 0.0
) -> list[tuple[Verdict, str]]:
    """Findings of a stream whose three tokens arrive in two messages."""
    comparison = Comparison(output(expected), tolerance)
    for first, end, logprobs in ((0, 1, pieces[0]), (1, 3, pieces[1])):
        part = CompletionDelta(0, "abc"[first:end], first, TOKENS[first:end], None, None, logprobs)
        comparison.take(RequestDelta("a", "m", [part], None))
    return [(finding.verdict, finding.message) for finding in comparison.findings]


def test_logprobs_are_compared_token_by_token():
    assert findings(LOGPROBS, LOGPROBS[:1], LOGPROBS[1:]) == []
    assert findings([], [], []) == []
    [(verdict, message)] = findings(LOGPROBS, LOGPROBS[:1], [LOGPROBS[1], LOGPROBS[1]])
    assert verdict is Verdict.CHANGED
    assert message.startswith("choice 0: log-probabilities of token 2: {2: ")


def test_missing_and_unrequested_logprobs_are_changed():
    for pieces in (([], LOGPROBS[1:]), (LOGPROBS[:1], LOGPROBS[1:2]), (LOGPROBS[:2], LOGPROBS[1:])):
        assert [verdict for verdict, _ in findings(LOGPROBS, *pieces)] == [Verdict.CHANGED]
    assert len(findings([], LOGPROBS[:1], LOGPROBS[1:])) == 2


def test_the_tolerance_is_configurable():
    near = [logprobs_of((2, -2.0005, 2), (1, -0.9995, 1)), *LOGPROBS[1:]]
    assert len(findings(LOGPROBS, near[:1], near[1:])) == 1
    assert findings(LOGPROBS, near[:1], near[1:], tolerance=TOLERANCE) == []


@pytest.mark.parametrize(
    ("requested", "logprobs", "is_complete"),
    [(3, LOGPROBS, True), (3, LOGPROBS[:2], False), (0, [], False), (None, [], True)],
)
def test_a_reference_without_requested_logprobs_is_incomplete(
    requested: int | None, logprobs: list[TokenLogprobs], is_complete: bool
):
    request = Request("logprobs", "p", SamplingParams(logprobs=requested))
    assert Reference(request, output(logprobs), 0.0).is_complete == is_complete

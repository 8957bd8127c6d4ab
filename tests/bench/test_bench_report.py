import json

import pytest

from quire.bench.equality import Equality, equality
from quire.bench.objectives import Objectives, objectives
from quire.bench.report import Report
from quire.bench.spread import Spread, percentile
from quire.bench.table import report_lines
from quire.bench.trace import Trace


def trace(**changes) -> Trace:
    """Four tokens in three messages, the first 0.2 s after it was due."""
    values = {
        "num_prompt_tokens": 10,
        "due_s": 1.0,
        "sent_s": 1.01,
        "times_s": [1.2, 1.3, 1.5],
        "counts": [1, 2, 1],
        "token_ids": [5, 6, 7, 8],
        "ended_s": 1.6,
        **changes,
    }
    return Trace(**values)


FAILED = trace(times_s=[], counts=[], token_ids=[], error="UNAVAILABLE", ended_s=2.0)


def test_latencies_count_from_the_moment_a_request_was_due():
    one = trace()
    assert one.first_token_s == pytest.approx(0.2)
    assert one.latency_s == pytest.approx(0.6)
    assert one.late_s == pytest.approx(0.01)
    assert one.gaps_s == pytest.approx([0.1, 0.2])


def test_a_token_behind_the_first_takes_its_share_of_the_time():
    assert trace().per_output_token_s == pytest.approx(0.1)
    assert trace(times_s=[1.2], counts=[1]).per_output_token_s is None
    assert FAILED.per_output_token_s is None


def test_a_server_that_counts_itself_is_believed():
    assert trace().num_output_tokens == 4
    assert trace(num_counted_tokens=9).num_output_tokens == 9


def test_percentiles_lie_between_the_nearest_ranks():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([1, 2, 3, 4], 0) == 1
    assert percentile([1, 2, 3, 4], 100) == 4
    assert percentile(range(101), 99) == 99
    assert percentile([7.0], 90) == 7.0


def test_a_spread_needs_no_order_and_there_is_none_of_nothing():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 2.0, 2.8, 2.98, 3.0)
    assert Spread.of([]) is None


@pytest.mark.parametrize(
    ("limits", "is_met"),
    [
        (Objectives(), True),
        (Objectives(ttft=200.1, tpot=100.1, e2el=600.1), True),
        (Objectives(ttft=199), False),
        (Objectives(tpot=99), False),
        (Objectives(e2el=599), False),
    ],
)
def test_objectives_are_met_all_of_them_or_not(limits, is_met):
    assert limits.met_by(trace()) is is_met


def test_who_failed_met_nothing():
    assert not Objectives().met_by(FAILED)


def test_a_limit_on_what_did_not_happen_is_kept():
    assert Objectives(tpot=1).met_by(trace(times_s=[1.2], counts=[1]))


def test_objectives_as_they_are_written():
    assert objectives(["ttft:200", "tpot:12.5"]) == Objectives(ttft=200, tpot=12.5)
    assert not objectives([]).are_set


@pytest.mark.parametrize("form", ["ttft", "ttft:", "ttft:0", "ttft:nan", "itl:5", ":5"])
def test_what_is_no_objective_is_shown(form):
    with pytest.raises(ValueError, match="goodput: ") as caught:
        objectives([form])
    assert repr(form) in str(caught.value)


def test_a_report_counts_what_completed_and_names_what_did_not():
    slow = trace(due_s=0.0, sent_s=0.0, ended_s=1.6)
    report = Report.of("quire", [trace(), slow, FAILED], Objectives(ttft=300))
    assert (report.num_requests, report.num_failed) == (3, 1)
    assert report.errors == {"UNAVAILABLE": 1}
    assert report.duration_s == 2.0
    assert (report.num_prompt_tokens, report.num_output_tokens) == (20, 8)
    assert (report.requests_per_s, report.output_tokens_per_s) == (1.0, 4.0)
    assert report.total_tokens_per_s == 14.0
    assert report.goodput_per_s == 0.5
    assert report.ttft is not None
    assert report.ttft.max == pytest.approx(1.2)
    assert report.itl is not None
    assert report.itl.max == pytest.approx(0.2)


def test_without_objectives_there_is_no_goodput():
    assert Report.of("quire", [trace()], Objectives()).goodput_per_s is None


def test_a_report_of_failures_alone_has_no_latencies():
    report = Report.of("quire", [FAILED], Objectives())
    assert (report.ttft, report.itl, report.tpot, report.e2el) == (None, None, None, None)
    assert json.loads(json.dumps(report.as_dict()))["errors"] == {"UNAVAILABLE": 1}
    assert "-" in "\n".join(report_lines([report]))


def test_one_server_has_a_column():
    report = Report.of("quire", [trace()], Objectives())
    lines = report_lines([report])
    assert lines[0].split() == ["quire"]
    assert any(line.split() == ["output", "tokens/s", "2.5"] for line in lines)
    assert any("time to first token, p50, ms" in line and line.endswith("200.0") for line in lines)
    assert not any("goodput" in line or "failed" in line for line in lines)


def test_two_servers_stand_side_by_side_with_their_ratio():
    ours = Report.of("quire", [trace()], Objectives(ttft=300))
    theirs = Report.of("openai", [trace(ended_s=3.2), FAILED], Objectives(ttft=300))
    lines = report_lines([ours, theirs])
    assert lines[0].split() == ["quire", "openai", "quire", "/", "openai"]
    assert any(line.split() == ["output", "tokens/s", "2.5", "1.2", "2.00"] for line in lines)
    assert any(line.split() == ["failed", "requests", "0", "1"] for line in lines)
    assert len({len(line) for line in lines if line.endswith("2.00")}) == 1


def test_equality_counts_tokens_up_to_the_first_that_differs():
    ours = [[1, 2, 3, 4], [1, 2]]
    assert equality(ours, ours) == Equality(1.0, 1.0)
    assert equality(ours, [[1, 2, 9, 4], [1, 2]]) == Equality(4 / 6, 0.5)
    assert equality(ours, [[1, 2, 3, 4, 5], [1, 2]]) == Equality(6 / 7, 0.5)


def test_there_is_no_equality_with_what_tells_no_tokens():
    assert equality([[1], [2]], [[], []]) is None


def test_outputs_of_other_requests_are_not_compared():
    with pytest.raises(ValueError, match="zip"):
        equality([[1]], [[1], [2]])

import pytest

from quire.bench.objectives import ServiceLevelObjectives, objectives
from quire.bench.report import Equality, LatencySummary, Report, equality, percentile
from quire.bench.request_timings import RequestTimings
from quire.cli.bench.report import report_lines


def timings(**changes) -> RequestTimings:
    """Four tokens in three messages, the first 0.2 s after the arrival."""
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
    return RequestTimings(**values)


FAILED = timings(times_s=[], counts=[], token_ids=[], error="UNAVAILABLE", ended_s=2.0)


def test_latencies_count_from_the_arrival():
    one = timings()
    assert one.first_token_s == pytest.approx(0.2)
    assert one.latency_s == pytest.approx(0.6)
    assert one.late_s == pytest.approx(0.01)
    assert one.gaps_s == pytest.approx([0.1, 0.2])


def test_time_per_output_token_is_the_mean_after_the_first_token():
    assert timings().per_output_token_s == pytest.approx(0.1)
    assert timings(times_s=[1.2], counts=[1]).per_output_token_s is None
    assert FAILED.per_output_token_s is None


def test_the_servers_own_count_of_tokens_is_used():
    assert timings().num_output_tokens == 4
    assert timings(num_counted_tokens=9).num_output_tokens == 9


def test_percentiles_are_interpolated_between_ranks():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([1, 2, 3, 4], 0) == 1
    assert percentile([1, 2, 3, 4], 100) == 4
    assert percentile(range(101), 99) == 99
    assert percentile([7.0], 90) == 7.0


def test_a_summary_needs_no_order_and_is_none_without_values():
    expected = LatencySummary(2.0, 2.0, 2.8, 2.98, 3.0)
    assert LatencySummary.of([3.0, 1.0, 2.0]) == expected
    assert LatencySummary.of([]) is None


@pytest.mark.parametrize(
    ("limits", "is_met"),
    [
        (ServiceLevelObjectives(), True),
        (ServiceLevelObjectives(ttft=200.1, tpot=100.1, e2el=600.1), True),
        (ServiceLevelObjectives(ttft=199), False),
        (ServiceLevelObjectives(tpot=99), False),
        (ServiceLevelObjectives(e2el=599), False),
    ],
)
def test_a_request_meets_all_objectives_or_none(limits, is_met):
    assert limits.met_by(timings()) is is_met


def test_a_failed_request_does_not_meet_objectives():
    assert not ServiceLevelObjectives().met_by(FAILED)


def test_a_latency_that_does_not_exist_is_within_its_limit():
    assert ServiceLevelObjectives(tpot=1).met_by(timings(times_s=[1.2], counts=[1]))


def test_objectives_are_parsed():
    assert objectives(["ttft:200", "tpot:12.5"]) == ServiceLevelObjectives(ttft=200, tpot=12.5)
    assert not objectives([]).are_set


@pytest.mark.parametrize("form", ["ttft", "ttft:", "ttft:0", "ttft:nan", "itl:5", ":5"])
def test_an_invalid_objective_is_shown(form):
    with pytest.raises(ValueError, match="goodput: ") as caught:
        objectives([form])
    assert repr(form) in str(caught.value)


def test_a_report_counts_completed_requests_and_errors():
    slow = timings(due_s=0.0, sent_s=0.0, ended_s=1.6)
    report = Report.of("quire", [timings(), slow, FAILED], ServiceLevelObjectives(ttft=300))
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
    assert Report.of("quire", [timings()], ServiceLevelObjectives()).goodput_per_s is None


def test_a_report_of_failed_requests_has_no_latencies():
    report = Report.of("quire", [FAILED], ServiceLevelObjectives())
    assert (report.ttft, report.itl, report.tpot, report.e2el) == (None, None, None, None)
    assert report.errors == {"UNAVAILABLE": 1}
    assert "-" in "\n".join(report_lines([report]))


def test_one_server_has_a_column():
    report = Report.of("quire", [timings()], ServiceLevelObjectives())
    lines = report_lines([report])
    assert lines[0].split() == ["quire"]
    assert any(line.split() == ["output", "tokens/s", "2.5"] for line in lines)
    assert any("time to first token, p50, ms" in line and line.endswith("200.0") for line in lines)
    assert not any("goodput" in line or "failed" in line for line in lines)


def test_two_servers_have_two_columns_and_their_ratio():
    ours = Report.of("quire", [timings()], ServiceLevelObjectives(ttft=300))
    theirs = Report.of("openai", [timings(ended_s=3.2), FAILED], ServiceLevelObjectives(ttft=300))
    lines = report_lines([ours, theirs])
    assert lines[0].split() == ["quire", "openai", "quire", "/", "openai"]
    assert any(line.split() == ["output", "tokens/s", "2.5", "1.2", "2.00"] for line in lines)
    assert any(line.split() == ["failed", "requests", "0", "1"] for line in lines)
    assert len({len(line) for line in lines if line.endswith("2.00")}) == 1


def test_equality_counts_tokens_before_the_first_difference():
    ours = [[1, 2, 3, 4], [1, 2]]
    assert equality(ours, ours) == Equality(1.0, 1.0)
    assert equality(ours, [[1, 2, 9, 4], [1, 2]]) == Equality(4 / 6, 0.5)
    assert equality(ours, [[1, 2, 3, 4, 5], [1, 2]]) == Equality(6 / 7, 0.5)


def test_without_tokens_there_is_no_equality():
    assert equality([[1], [2]], [[], []]) is None


def test_different_numbers_of_outputs_are_not_compared():
    with pytest.raises(ValueError, match="zip"):
        equality([[1]], [[1], [2]])

"""Text of benchmark results: a table with one column per server."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.bench.report import Report
from quire.bench.run import LoadResult
from quire.cli.table import aligned

_LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2el": "end-to-end latency",
}
_PERCENTS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class _Row:
    """A value of every report; None if a report does not have it."""

    label: str
    form: str
    of: Callable[[Report], float | None]
    # Whether the ratio of two servers is shown.
    compares: bool = True


def result_lines(result: LoadResult) -> Iterator[str]:
    """The table, the errors, and the equality of the outputs."""
    yield from report_lines(result.reports)
    for report in result.reports:
        for error, count in report.errors.items():
            yield f"{report.server}: {count} requests failed: {error}"
    if (same := result.equality) is not None:
        yield f"equal: {same.tokens:.1%} of the tokens, {same.requests:.1%} of the requests"


def report_lines(reports: Sequence[Report]) -> list[str]:
    """A line per value and a column per server; for two servers also their ratio."""
    header = ["", *(report.server for report in reports)]
    if len(reports) == 2:
        header.append(f"{reports[0].server} / {reports[1].server}")
    return aligned([header, *(_cells(row, reports) for row in _rows(reports))])


def _rows(reports: Sequence[Report]) -> Iterator[_Row]:
    yield _Row("requests", ",d", lambda report: report.num_requests, compares=False)
    if any(report.num_failed for report in reports):
        yield _Row("failed requests", ",d", lambda report: report.num_failed, compares=False)
    yield _Row("duration, s", ".2f", lambda report: report.duration_s)
    yield _Row("prompt tokens", ",d", lambda report: report.num_prompt_tokens, compares=False)
    yield _Row("output tokens", ",d", lambda report: report.num_output_tokens, compares=False)
    yield _Row("requests/s", ".2f", lambda report: report.requests_per_s)
    yield _Row("output tokens/s", ",.1f", lambda report: report.output_tokens_per_s)
    yield _Row("all tokens/s", ",.1f", lambda report: report.total_tokens_per_s)
    if any(report.tokens_per_step is not None for report in reports):
        yield _Row("tokens per row and step", ".2f", lambda report: report.tokens_per_step)
    if any(report.draft_acceptance is not None for report in reports):
        yield _Row("accepted drafts", ".0%", lambda report: report.draft_acceptance)
    if any(report.goodput_per_s is not None for report in reports):
        yield _Row("goodput, requests/s", ".2f", lambda report: report.goodput_per_s)
    for key, name in _LATENCIES.items():
        for percent in _PERCENTS:
            yield _Row(f"{name}, {percent}, ms", ",.1f", _latency(key, percent))
    yield _Row("sent late, p99, ms", ",.1f", _latency("late", "p99"), compares=False)


def _latency(key: str, percent: str) -> Callable[[Report], float | None]:
    def of(report: Report) -> float | None:
        summary = getattr(report, key)
        return None if summary is None else 1000 * float(getattr(summary, percent))

    return of


def _cells(row: _Row, reports: Sequence[Report]) -> list[str]:
    values = [row.of(report) for report in reports]
    cells = [row.label, *("-" if value is None else format(value, row.form) for value in values)]
    return [*cells, _ratio(values, row.compares)] if len(reports) == 2 else cells


def _ratio(values: Sequence[float | None], compares: bool) -> str:
    first, second = values
    return f"{first / second:.2f}" if compares and first is not None and second else ""

"""Reports side by side, as lines for people."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.bench.report import Report

_MS_PER_S = 1000
_LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2el": "end-to-end latency",
}
_PERCENTS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class _Row:
    """One figure of every report; None where a report has none."""

    label: str
    form: str
    of: Callable[[Report], float | None]
    # Whether the ratio of two servers says something.
    compares: bool = True


def report_lines(reports: Sequence[Report]) -> list[str]:
    """A line per figure and a column per server; of two servers also the first by the second."""
    header = ["", *(report.server for report in reports)]
    if len(reports) == 2:
        header.append(f"{reports[0].server} / {reports[1].server}")
    return _aligned([header, *(_cells(row, reports) for row in _rows(reports))])


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
    if any(report.goodput_per_s is not None for report in reports):
        yield _Row("goodput, requests/s", ".2f", lambda report: report.goodput_per_s)
    for key, name in _LATENCIES.items():
        for percent in _PERCENTS:
            yield _Row(f"{name}, {percent}, ms", ",.1f", _latency(key, percent))
    yield _Row("sent late, p99, ms", ",.1f", _latency("late", "p99"), compares=False)


def _latency(key: str, percent: str) -> Callable[[Report], float | None]:
    def of(report: Report) -> float | None:
        spread = getattr(report, key)
        return None if spread is None else _MS_PER_S * float(getattr(spread, percent))

    return of


def _cells(row: _Row, reports: Sequence[Report]) -> list[str]:
    values = [row.of(report) for report in reports]
    cells = [row.label, *("-" if value is None else format(value, row.form) for value in values)]
    return [*cells, _ratio(values, row.compares)] if len(reports) == 2 else cells


def _ratio(values: Sequence[float | None], compares: bool) -> str:
    first, second = values
    return f"{first / second:.2f}" if compares and first is not None and second else ""


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Labels to the left, numbers to the right, as wide as they need."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

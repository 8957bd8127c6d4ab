"""The scheduler's time per step by number of rows."""

from collections.abc import Sequence

from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.throughput import Effort, decode_window

_STEP_MS = 10.0
_TARGET_ROWS = 256
_TARGET_MS = 1.0


def by_rows(sizes: Sequence[int], effort: Effort) -> Part:
    rows = [_row(num_rows, effort) for num_rows in sizes]
    return Part(
        name="rows",
        title="The scheduler's time per step, by rows",
        notes=[
            f"One worker, {_STEP_MS:g} ms per step, every row decodes. *CPU* as above; *loop* is "
            "its part in the event loop's thread; *lane* is the lane's own measure of its work "
            "(`quire:scheduling_time_seconds`), without gRPC, asyncio and the Redis client.",
        ],
        columns=[
            Column("rows", "rows", "d"),
            Column("cpu_ms", "CPU ms", ".2f"),
            Column("cpu_p50_ms", "p50", ".2f"),
            Column("cpu_p99_ms", "p99", ".2f"),
            Column("loop_p50_ms", "loop p50 ms", ".2f"),
            Column("scheduling_p50_ms", "lane p50 ms", ".2f"),
            Column("scheduling_p99_ms", "p99", ".2f"),
            Column("redis_p50_ms", "Redis wait p50 ms", ".2f"),
            Column("redis_server_ms", "server ms", ".2f"),
            Column("tokens_per_s", "tokens/s", ",.0f"),
            Column("of_ideal", "of ideal", ".3f"),
        ],
        rows=rows,
        targets=[target for row in rows if row["rows"] == _TARGET_ROWS for target in _targets(row)],
    )


def _row(num_rows: int, effort: Effort) -> dict[str, Cell]:
    window = decode_window(1, num_rows, _STEP_MS, effort)
    ideal = num_rows * 1000 / _STEP_MS
    return {"rows": num_rows, "of_ideal": window.tokens_per_s / ideal, **window.figures()}


def _targets(row: dict[str, Cell]) -> list[Target]:
    return [
        _target("mean", float(row["cpu_ms"] or 0)),
        _target("p50", float(row["cpu_p50_ms"] or 0)),
    ]


def _target(what: str, value_ms: float) -> Target:
    return Target(
        f"CPU per step at {_TARGET_ROWS} rows, {what}",
        f"at most {_TARGET_MS:g} ms",
        f"{value_ms:.2f} ms",
        value_ms <= _TARGET_MS,
    )

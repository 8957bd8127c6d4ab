"""Bar chart of the throughputs."""

from collections.abc import Iterable

from benchmarks.engines.systems import QUIRE, RUNNER
from benchmarks.plot import Bar, Group, svg
from benchmarks.report import Part

_OURS = {QUIRE.title, RUNNER.title}
_PREFIX = "throughput-"


def plot(parts: Iterable[Part]) -> str | None:
    """Draw the throughput parts as SVG; None if there are none."""
    groups = [_group(part) for part in parts if part.name.startswith(_PREFIX)]
    return svg(groups) if groups else None


def _group(part: Part) -> Group:
    bars = [
        Bar(str(row["system"]).replace("`", ""), value, row["system"] in _OURS)
        for row in part.rows
        if isinstance(value := row["tokens_per_s"], float)
    ]
    return Group(f"{part.title}: output tokens/s", bars)

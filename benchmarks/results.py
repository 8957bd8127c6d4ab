"""Results: one JSON file per benchmark and day, and the page that shows the latest of each."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import Part, markdown, part_of

_HERE = Path(__file__).parent
RESULTS = _HERE / "results"
PAGE = _HERE / "RESULTS.md"
# Of the page's sections, by benchmark, in their order.
_TITLES = {
    "engines": "Beside other engines",
    "kernels": "Kernels",
    "chaos": "Nothing is lost",
    "scheduler": "Scheduler",
}
# Of a machine's description, as far as a part has them.
_VERSIONS = ("python", "torch", "transformers", "grpcio", "protobuf", "redis")
_INTRODUCTION = """# Results

Rendered from the newest files in `benchmarks/results`; do not edit. What is measured, and how,
stands in [docs/benchmarks.md](../docs/benchmarks.md), and in [docs/chaos.md](../docs/chaos.md).
"""


# Draws parts as SVG; None if there is nothing to draw.
Plot = Callable[[Sequence[Part]], str | None]


@dataclass(frozen=True)
class Measured:
    """A part, and the machine as it was before it."""

    machine: Mapping[str, object]
    part: Part


def write(name: str, measured: Measured, order: Sequence[str], plot: Plot = lambda _: None) -> None:
    """Enters a part into today's file of a benchmark, and renders the page. The day's other parts
    stay; `order` is that of all parts. A plot of the day's parts is written beside the file."""
    today = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"{name}-{today}.json"
    former = json.loads(path.read_text())["parts"] if path.exists() else {}
    latest = {"machine": dict(measured.machine), **asdict(measured.part)}
    parts = {**former, measured.part.name: latest}
    ordered = {key: parts[key] for key in order if key in parts}
    document = {"benchmark": name, "date": today, "parts": ordered}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if (drawn := plot([part_of(part) for part in ordered.values()])) is not None:
        path.with_suffix(".svg").write_text(drawn)
    _render()


def _render() -> None:
    sections = [_section(name, title) for name, title in _TITLES.items()]
    PAGE.write_text("\n".join([_INTRODUCTION, *filter(None, sections)]))


def _section(name: str, title: str) -> str:
    files = sorted(RESULTS.glob(f"{name}-*.json"))
    if not files:
        return ""
    document = json.loads(files[-1].read_text())
    parts = document["parts"].values()
    shown = [f"{markdown(part_of(part))}\n\n{_origin(part['machine'])}" for part in parts]
    plot = files[-1].with_suffix(".svg")
    drawn = [f"![{title}]({RESULTS.name}/{plot.name})"] if plot.exists() else []
    when = f"Measured on {document['date']}."
    return "\n\n".join([f"## {title}", when, *drawn, *shown]) + "\n"


def _origin(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{k} {machine[k]}" for k in _VERSIONS if k in machine)
    return (
        f"<sub>{machine['cores']} cores of {machine['processor']}, {machine['system']}; {versions}"
        f" (server {machine['redis_server']}); commit {machine['commit']}; before it the load "
        f"average was {machine['load_average']:.1f} and 100,000 turns of a Python loop took "
        f"{machine['spin_ms']:.1f} ms</sub>"
    )

"""Results: one JSON file per benchmark and day, and the page that shows each part's newest ones."""

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
    "gpu": "On a GPU",
    "chaos": "Nothing is lost",
    "scheduler": "Scheduler",
}
# What the page says of a benchmark that has given nothing; others are left out.
_UNMEASURED = {
    "gpu": "Unmeasured: no figure of the CUDA part has been taken yet. `make bench-gpu`, on a "
    "machine with a GPU, enters them here."
}
# Of a machine's description, as far as a part has them.
_VERSIONS = ("python", "torch", "triton", "cuda", "transformers", "grpcio", "protobuf", "redis")
_INTRODUCTION = """# Results

Rendered from the files in `benchmarks/results`, of each part the newest figures; do not edit. What
is measured, and how, stands in [docs/benchmarks.md](../docs/benchmarks.md), and in
[docs/chaos.md](../docs/chaos.md).
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
    stay; `order` is that of all parts there are, and the page leaves out what is not among them. A
    plot of all parts, each as it was measured last, is written beside the file."""
    today = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"{name}-{today}.json"
    former = json.loads(path.read_text())["parts"] if path.exists() else {}
    latest = {"machine": dict(measured.machine), **asdict(measured.part)}
    parts = {**former, measured.part.name: latest}
    ordered = {key: parts[key] for key in order if key in parts}
    document = {"benchmark": name, "date": today, "order": list(order), "parts": ordered}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if (drawn := plot([part_of(entry.part) for entry in _newest(name)])) is not None:
        path.with_suffix(".svg").write_text(drawn)
    render()


def num_rows(name: str, part: str) -> int:
    """Of a part's newest table; 0 if there is none."""
    return sum(len(entry.part["rows"]) for entry in _newest(name) if entry.part["name"] == part)


def render() -> None:
    """Writes the page."""
    sections = [_section(name, title) for name, title in _TITLES.items()]
    PAGE.write_text("\n".join([_INTRODUCTION, *filter(None, sections)]))


@dataclass(frozen=True)
class _Entry:
    """A part as a file has it."""

    date: str
    part: Mapping[str, Any]


def _newest(name: str) -> list[_Entry]:
    """Each part of a benchmark as it was measured last, in the order that the newest file knows."""
    documents = [json.loads(file.read_text()) for file in sorted(RESULTS.glob(f"{name}-*.json"))]
    entries = {
        key: _Entry(document["date"], part)
        for document in documents
        for key, part in document["parts"].items()
    }
    # Files of earlier days may lack the order.
    order = documents[-1].get("order", entries) if documents else ()
    return [entries[key] for key in order if key in entries]


def _section(name: str, title: str) -> str:
    entries = _newest(name)
    if not entries:
        return f"## {title}\n\n{_UNMEASURED[name]}\n" if name in _UNMEASURED else ""
    shown = [f"{markdown(part_of(entry.part))}\n\n{_origin(entry)}" for entry in entries]
    plots = sorted(RESULTS.glob(f"{name}-*.svg"))
    drawn = [f"![{title}]({RESULTS.name}/{plots[-1].name})"] if plots else []
    return "\n\n".join([f"## {title}", *drawn, *shown]) + "\n"


def _origin(entry: _Entry) -> str:
    machine = entry.part["machine"]
    versions = ", ".join(f"{k} {machine[k]}" for k in _VERSIONS if machine.get(k))
    device = f"{machine['device']}, " if "device" in machine else ""
    return (
        f"<sub>{entry.date}: {device}{machine['cores']} cores of {machine['processor']}, "
        f"{machine['system']}; {versions} (server {machine['redis_server']}); commit "
        f"{machine['commit']}; before it the load average was {machine['load_average']:.1f} and "
        f"100,000 turns of a Python loop took {machine['spin_ms']:.1f} ms</sub>"
    )

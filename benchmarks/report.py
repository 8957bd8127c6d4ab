"""Tables of measurements and targets, and their rendering as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = float | int | str | None


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    heading: str
    # Format specification; `s` is text.
    form: str = "s"


@dataclass(frozen=True)
class Target:
    """An aim, and whether the measurement meets it."""

    what: str
    aim: str
    measured: str
    met: bool


@dataclass(frozen=True)
class Part:
    """One part of a benchmark: a table, its targets, and notes on how to read it."""

    name: str
    title: str
    notes: Sequence[str]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    targets: Sequence[Target]


def part_of(value: Mapping[str, Any]) -> Part:
    """Build a part from its `asdict` form."""
    return Part(
        name=value["name"],
        title=value["title"],
        notes=value["notes"],
        columns=[Column(**column) for column in value["columns"]],
        rows=value["rows"],
        targets=[Target(**target) for target in value["targets"]],
    )


def markdown(part: Part) -> str:
    """Render the part as a section of level 3."""
    headings = [column.heading for column in part.columns]
    rows = [[_shown(row.get(c.key), c.form) for c in part.columns] for row in part.rows]
    sections = [f"### {part.title}", *part.notes, table(headings, rows)]
    if part.targets:
        verdicts = [[t.what, t.aim, t.measured, "met" if t.met else "missed"] for t in part.targets]
        sections.append(table(["target", "aim", "measured", ""], verdicts))
    return "\n\n".join(sections)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a Markdown table that is also readable on a terminal."""
    lines = [headings, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(_line(cells, widths) for cells in ruled)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"


def _shown(value: Cell, form: str) -> str:
    return "-" if value is None else format(value, form)

"""Bar charts as SVG, small enough to be read in a diff. Needs no plotting library."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 760
_LABELS = 300
_VALUES = 70
_BAR, _GAP, _HEAD = 20, 8, 34
_COLORS = {True: "#2f6f9f", False: "#b9c4cc"}


@dataclass(frozen=True)
class Bar:
    """One value and its label."""

    label: str
    value: float
    # Whether it is Quire's, drawn in another colour.
    is_ours: bool = False


@dataclass(frozen=True)
class Group:
    """Bars on one scale."""

    title: str
    bars: Sequence[Bar]


def svg(groups: Sequence[Group], form: str = ",.0f") -> str:
    """Draw the groups one below the other; the longest bar of each fills the width."""
    parts, top = [], 0
    for group in groups:
        parts.append(_text(0, top + _HEAD - 12, group.title, "start", "bold"))
        top += _HEAD
        longest = max(bar.value for bar in group.bars)
        for bar in group.bars:
            parts += _drawn(bar, top, bar.value / longest, form)
            top += _BAR + _GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="{_WIDTH}" height="{top}" fill="white"/>\n{body}\n</svg>\n'
    )


def _drawn(bar: Bar, top: int, share: float, form: str) -> list[str]:
    width = round(share * (_WIDTH - _LABELS - _VALUES), 1)
    middle = top + _BAR - 5
    return [
        _text(_LABELS - 8, middle, bar.label, "end"),
        f'<rect x="{_LABELS}" y="{top}" width="{width}" height="{_BAR}" '
        f'fill="{_COLORS[bar.is_ours]}"/>',
        _text(_LABELS + width + 6, middle, format(bar.value, form), "start"),
    ]


def _text(x: float, y: float, words: str, anchor: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )

"""A pool of any size, drawn with characters."""

from collections import Counter
from typing import Final

# As operations.proto numbers what a block is; the null block is not drawn.
_HELD, _CACHED, _FREE = 3, 2, 1
_MARKS: Final = {_HELD: "#", _CACHED: "+", _FREE: "."}
_WORDS: Final = {_HELD: "held", _CACHED: "cached", _FREE: "free"}


def draw(block_map: bytes, width: int, height: int) -> tuple[list[str], int]:
    """Lines of at most `width` cells, `height` lines at most, and how many blocks a cell stands
    for. A cell shows what most of its blocks are; where two are equal, what is used more.
    """
    blocks = block_map[1:]
    per_cell = max(1, -(-len(blocks) // (width * height)))
    cells = "".join(
        _mark(blocks[start : start + per_cell]) for start in range(0, len(blocks), per_cell)
    )
    return [cells[start : start + width] for start in range(0, len(cells), width)], per_cell


def legend(block_map: bytes, per_cell: int) -> str:
    """What the characters mean, with the share of each."""
    blocks = block_map[1:]
    total = max(1, len(blocks))
    shares = (
        f"{mark} {_WORDS[kind]} {blocks.count(kind) / total:.0%}" for kind, mark in _MARKS.items()
    )
    scale = "" if per_cell == 1 else f", {per_cell:,} to a character"
    return f"{'  '.join(shares)}  of {len(blocks):,} blocks{scale}"


def _mark(blocks: bytes) -> str:
    counts = Counter(blocks)
    return _MARKS[max(_MARKS, key=lambda kind: (counts[kind], kind))]

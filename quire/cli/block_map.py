"""A pool of any size, drawn with characters."""

from collections import Counter
from typing import Final

HELD, CACHED, FREE = "#", "+", "."
LEGEND: Final = f"{HELD} held  {CACHED} cached  {FREE} free"
# As operations.proto numbers what a block is; the null block is not drawn.
_MARKS: Final = {3: HELD, 2: CACHED, 1: FREE}


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


def _mark(blocks: bytes) -> str:
    counts = Counter(blocks)
    return _MARKS[max(_MARKS, key=lambda kind: (counts[kind], kind))]

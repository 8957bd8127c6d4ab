"""Draws a step as aligned text."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from quire.internal.v1.worker_pb2 import ExplainedStep

_WIDTH = 96
_PER_TOKEN = (
    "request_indices",
    "positions",
    "token_indices",
    "input_ids",
    "block_table_indices",
    "block_numbers",
    "block_offsets",
    "slot_mapping",
)
_PER_ROW = ("query_start_loc", "seq_lens", "logits_indices")
_LABEL = max(len(name) for name in (*_PER_TOKEN, *_PER_ROW))


def draw_step(number: int, step: ExplainedStep, block_size: int) -> str:
    """Draw the rows, each row's tokens above their blocks, and the flattened batch."""
    lines = [
        f"Step {number}: {len(step.rows)} rows, {len(step.positions)} scheduled tokens, "
        f"blocks of {block_size}",
        "",
        *_rows(step),
        "",
        "Token table above block table; [scheduled in this step]",
        *_tables(step, block_size),
        "",
        "Inputs",
        *_columns({name: getattr(step, name) for name in _PER_TOKEN}),
        *_columns({name: getattr(step, name) for name in _PER_ROW}),
        "",
    ]
    return "\n".join(lines)


def _rows(step: ExplainedStep) -> Iterator[str]:
    columns = ("row", "tokens", "computed", "scheduled", "seq_len", "samples")
    yield "  ".join(columns)
    values = zip(
        step.rows,
        step.num_tokens,
        step.num_computed_tokens,
        step.num_scheduled_tokens,
        step.seq_lens,
        ("yes" if n == s else "no" for n, s in zip(step.num_tokens, step.seq_lens, strict=True)),
        strict=True,
    )
    for line in values:
        cells = zip(line, columns, strict=True)
        yield "  ".join(f"{value:>{len(column)}}" for value, column in cells)


def _tables(step: ExplainedStep, block_size: int) -> Iterator[str]:
    tokens = _split(step.token_ids, step.num_tokens)
    blocks = _split(step.block_ids, step.num_blocks)
    for i, row in enumerate(step.rows):
        scheduled = range(step.num_computed_tokens[i], step.seq_lens[i])
        cells = list(_cells(tokens[i], blocks[i], block_size, scheduled))
        for start, end in _lines([len(cell[0]) for cell in cells], gap=3):
            yield _line(f"row {row}" if not start else "", [c[0] for c in cells[start:end]])
            yield _line("blocks" if not start else "", [c[1] for c in cells[start:end]])


def _cells(
    tokens: Sequence[int], blocks: Sequence[int], block_size: int, scheduled: range
) -> Iterator[tuple[str, str]]:
    """Yield each block's tokens and its number, padded to equal width; tokens without a block are
    last."""
    num_cells = max(len(blocks), -(-len(tokens) // block_size))
    for i in range(num_cells):
        positions = range(i * block_size, min((i + 1) * block_size, len(tokens)))
        text = " ".join(f"[{tokens[p]}]" if p in scheduled else str(tokens[p]) for p in positions)
        block = str(blocks[i]) if i < len(blocks) else "-"
        width = max(len(text), len(block))
        yield f"{text:<{width}}", f"{block:<{width}}"


def _line(label: str, cells: list[str]) -> str:
    return f"{label:<10}{' | '.join(cells)}".rstrip()


def _columns(arrays: dict[str, Sequence[int]]) -> Iterator[str]:
    """Arrays of different lengths below each other, one entry per column."""
    longest = max(len(array) for array in arrays.values())
    widths = [
        max(len(str(array[i])) for array in arrays.values() if i < len(array))
        for i in range(longest)
    ]
    for start, end in _lines(widths, gap=1):
        for name, array in arrays.items():
            values = zip(array[start:end], widths[start:end], strict=False)
            cells = " ".join(f"{value:>{width}}" for value, width in values)
            yield f"{name:<{_LABEL}}  {cells}".rstrip()


def _lines(widths: Sequence[int], gap: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (start, end) of cells that fit into a line."""
    start, used = 0, 0
    for i, width in enumerate(widths):
        if i > start and used + width > _WIDTH - _LABEL:
            yield start, i
            start, used = i, 0
        used += width + gap
    yield start, len(widths)


def _split(values: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    ends = list(accumulate(counts, initial=0))
    return [values[start:end] for start, end in pairwise(ends)]

"""The scheduler's time per step beside that of another commit, in one run."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.throughput import Effort

_ROOT: Final = Path(__file__).parents[2]
_STEP_MS: Final = 10.0
_TARGET_ROWS: Final = 256
_TARGET_MS: Final = 1.0
_TARGET_RATIO: Final = 2.5
# Runs in each tree, by its own code.
_MEASURE: Final = """
import json, sys
from benchmarks.scheduler.throughput import Effort, decode_window
rows, step_ms, effort = json.loads(sys.argv[1])
print(json.dumps(decode_window(1, rows, step_ms, Effort(**effort)).figures()))
"""


def beside(commit: str, sizes: Sequence[int], effort: Effort, num_rounds: int) -> Part:
    """Measure the commit and this tree alternately, `num_rounds` times for each number of rows."""
    effort = effort.of_steps(_STEP_MS)
    with _checked_out(commit) as tree:
        rows = [_row(tree, num_rows, effort, num_rounds) for num_rows in sizes]
    return Part(
        name="beside",
        title=f"The scheduler's time per step, beside {commit}",
        notes=[
            f"One worker, {_STEP_MS:g} ms per step, every row decodes. Processor time of the "
            f"scheduler's process per step: the median over the steps of a window, and the mean. "
            f"Both trees are measured in each of {num_rounds} rounds, in alternating order, with "
            f"{effort.num_windows} windows of {effort.window_s:.3g} s. Figures are medians of the "
            "rounds, ratios those of the ratios within rounds.",
        ],
        columns=[
            Column("rows", "rows", "d"),
            Column("then_p50_ms", f"{commit} p50 ms", ".2f"),
            Column("now_p50_ms", "now p50 ms", ".2f"),
            Column("ratio", "ratio", ".2f"),
            Column("then_ms", f"{commit} mean ms", ".2f"),
            Column("now_ms", "now mean ms", ".2f"),
            Column("mean_ratio", "ratio", ".2f"),
        ],
        rows=rows,
        targets=[target for row in rows if row["rows"] == _TARGET_ROWS for target in _targets(row)],
    )


def _row(tree: Path, num_rows: int, effort: Effort, num_rounds: int) -> dict[str, Cell]:
    then: list[dict[str, float]] = []
    now: list[dict[str, float]] = []
    for number in range(num_rounds):
        # What the machine does in one half of a round must not favour one of them.
        pairs = [(tree, then), (_ROOT, now)]
        for root, found in pairs if number % 2 == 0 else reversed(pairs):
            found.append(_measured(root, num_rows, effort))
    return {"rows": num_rows, **summary(then, now)}


def summary(then: list[dict[str, float]], now: list[dict[str, float]]) -> dict[str, Cell]:
    """Medians of the figures of rounds, in parallel, and of the ratios within rounds."""

    def ratio(key: str) -> float:
        return median(old[key] / new[key] for old, new in zip(then, now, strict=True))

    return {
        "then_p50_ms": median(found["cpu_p50_ms"] for found in then),
        "now_p50_ms": median(found["cpu_p50_ms"] for found in now),
        "ratio": ratio("cpu_p50_ms"),
        "then_ms": median(found["cpu_ms"] for found in then),
        "now_ms": median(found["cpu_ms"] for found in now),
        "mean_ratio": ratio("cpu_ms"),
    }


def _targets(row: dict[str, Cell]) -> list[Target]:
    now_ms, ratio = float(row["now_p50_ms"] or 0), float(row["ratio"] or 0)
    what = f"CPU per step at {_TARGET_ROWS} rows, p50"
    return [
        Target(what, f"at most {_TARGET_MS:g} ms", f"{now_ms:.2f} ms", now_ms <= _TARGET_MS),
        Target(
            f"{what}, then / now",
            f"at least {_TARGET_RATIO:g}",
            f"{ratio:.2f}",
            ratio >= _TARGET_RATIO,
        ),
    ]


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """A worktree of the commit with its stubs."""
    with tempfile.TemporaryDirectory(prefix="quire-beside-") as directory:
        tree = Path(directory) / "tree"
        _run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], _ROOT)
        try:
            _run([sys.executable, "build_stubs.py", "."], tree)
            yield tree
        finally:
            _run(["git", "worktree", "remove", "--force", str(tree)], _ROOT)


def _measured(root: Path, num_rows: int, effort: Effort) -> dict[str, float]:
    arguments = json.dumps((num_rows, _STEP_MS, asdict(effort)))
    printed = _run([sys.executable, "-c", _MEASURE, arguments], root)
    figures: dict[str, float] = json.loads(printed.splitlines()[-1])
    return figures


def _run(command: Sequence[str], root: Path) -> str:
    """Run a command in a tree, whose modules it imports; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        command, cwd=root, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout

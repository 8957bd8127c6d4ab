"""`python -m benchmarks.ranks MODEL` compares workers of one and of several ranks with as many
threads in all, shows what a step costs in communication, and writes the results."""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from statistics import median
from typing import Final

from benchmarks import results
from benchmarks.machine import description
from benchmarks.ranks.decoding import Decoding, Job
from benchmarks.ranks.messages import latency_ms
from benchmarks.report import Cell, Column, Part, Target, markdown
from benchmarks.results import Measured

_NAME: Final = "ranks"
_PART: Final = "tensor-parallel"
_COLUMNS: Final = (
    Column("rows", "rows", "d"),
    Column("ranks", "ranks", "d"),
    Column("stages", "stages", "d"),
    Column("step_ms", "ms per step", ".2f"),
    Column("tokens", "tokens per second", ".0f"),
    Column("overhead", "over one rank", "+.1%"),
    Column("least", "least of the rounds", "+.1%"),
    Column("most", "most", "+.1%"),
    Column("message_ms", "message, ms", ".3f"),
    Column("calls", "calls", ".0f"),
    Column("kib", "KiB", ".0f"),
    Column("communication", "communication", ".1%"),
)
_MOST_OVERHEAD: Final = 0.15
_MOST_MESSAGE_MS: Final = 0.3
_MESSAGE_ROWS: Final = 256

# By the numbers of ranks and of stages, then of rows: a measurement per round.
Layout = tuple[int, int]
Rounds = dict[Layout, dict[int, list[Decoding]]]


def main() -> int:
    options = _options()
    machine = description()
    found: Rounds = {}
    # Alternately, so that a change of the machine's speed affects all of them.
    for _ in range(options.rounds):
        for layout in _layouts(options):
            of_ranks = found.setdefault(layout, defaultdict(list))
            for one in _run(_job(options, layout)):
                of_ranks[one.num_rows].append(one)
    part = _part(options, found, latency_ms(_MESSAGE_ROWS))
    print(markdown(part))
    if options.write:
        results.write(_NAME, Measured(machine, part), [_PART])
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of one stage")
    parser.add_argument("--stages", type=int, nargs="*", default=[2], help="of one rank each")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-write", dest="write", action="store_false", help="only print")
    return parser.parse_args()


def _layouts(options: argparse.Namespace) -> list[Layout]:
    of_shards = [(num_ranks, 1) for num_ranks in options.ranks]
    return of_shards + [(num_stages, num_stages) for num_stages in options.stages]


def _job(options: argparse.Namespace, layout: Layout) -> Job:
    num_ranks, num_stages = layout
    return Job(
        model=options.model,
        dtype=options.dtype,
        num_shards=num_ranks // num_stages,
        num_stages=num_stages,
        threads=options.threads,
        num_rows=options.rows,
        num_steps=options.steps,
    )


def _run(job: Job) -> list[Decoding]:
    command = [sys.executable, "-m", "benchmarks.ranks.decoding", json.dumps(asdict(job))]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Decoding(**one) for one in json.loads(printed)]


def _part(options: argparse.Namespace, found: Rounds, message_ms: float) -> Part:
    first = found[options.ranks[0], 1]
    rows = [
        _row(layout, num_rows, found[layout][num_rows], first[num_rows])
        for num_rows in options.rows
        for layout in _layouts(options)
    ]
    overheads = [row for row in rows if (row["ranks"], row["stages"]) == (2, 1)]
    targets = [
        Target(
            what=f"step of two ranks with {row['rows']} rows, over one rank",
            aim=f"< {_MOST_OVERHEAD:.0%}",
            measured=f"{row['overhead']:+.1%}",
            met=float(row["overhead"] or 0) < _MOST_OVERHEAD,
        )
        for row in overheads
    ]
    targets.append(
        Target(
            what=f"message of {_MESSAGE_ROWS} rows, from its sending to its receipt",
            aim=f"<= {_MOST_MESSAGE_MS} ms",
            measured=f"{message_ms:.3f} ms",
            met=message_ms <= _MOST_MESSAGE_MS,
        )
    )
    return Part(
        name=_PART,
        title=f"Ranks with {options.threads} threads in all, {options.dtype}",
        notes=[
            f"Decoding on the runner, without services; medians of {options.rounds} rounds of "
            f"{options.steps} steps, in which one and several ranks alternate. The overhead is the "
            "median of the rounds' ratios. Messages are those of rank 0 to the others; calls, "
            "bytes and the share of time are all communication of rank 0 in a step, with its "
            "waiting for the others. With stages a step is one token of all rows, which are in as "
            "many plans in flight; what they send is counted, and their waiting is not."
        ],
        columns=_COLUMNS,
        rows=rows,
        targets=targets,
    )


def _row(
    layout: Layout, num_rows: int, runs: list[Decoding], first: list[Decoding]
) -> dict[str, Cell]:
    """Medians of all rounds."""
    step_ms = median(run.step_ms for run in runs)
    ratios = [one.step_ms / other.step_ms - 1 for one, other in zip(runs, first, strict=True)]
    return {
        "rows": num_rows,
        "ranks": layout[0],
        "stages": layout[1],
        "step_ms": step_ms,
        "tokens": num_rows / step_ms * 1e3,
        "overhead": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "message_ms": median(run.message_ms for run in runs),
        "calls": runs[0].num_calls,
        "kib": runs[0].num_bytes / 1024,
        "communication": median(run.communication_ms / run.step_ms for run in runs),
    }


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.ranks MODEL` compares workers of one and of several ranks with as many
threads in all, and shows what a step costs in communication. Writes nothing."""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from statistics import median
from typing import Final

from benchmarks.ranks.decoding import Decoding, Job

_HEADER: Final = (
    "| ranks | ms per step | tokens per second | messages, ms | calls | KiB | communication |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> None:
    options = _options()
    found: defaultdict[int, list[Decoding]] = defaultdict(list)
    # Alternately, so that a change of the machine's speed affects all of them.
    for _ in range(options.rounds):
        for num_ranks in options.ranks:
            found[num_ranks].append(_run(_job(options, num_ranks)))
    print(f"{options.rows} rows, {options.dtype}, {options.threads} threads in all\n\n{_HEADER}")
    for num_ranks, runs in found.items():
        print(_line(num_ranks, options.rows, runs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _job(options: argparse.Namespace, num_ranks: int) -> Job:
    return Job(
        model=options.model,
        dtype=options.dtype,
        num_ranks=num_ranks,
        threads=options.threads,
        num_rows=options.rows,
        num_steps=options.steps,
    )


def _run(job: Job) -> Decoding:
    command = [sys.executable, "-m", "benchmarks.ranks.decoding", json.dumps(asdict(job))]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Decoding(**json.loads(printed))


def _line(num_ranks: int, num_rows: int, runs: list[Decoding]) -> str:
    """The medians of all rounds."""
    step_ms = median(run.step_ms for run in runs)
    message_ms = median(run.message_ms for run in runs)
    share = median(run.communication_ms / run.step_ms for run in runs)
    return (
        f"| {num_ranks} | {step_ms:.2f} | {num_rows / step_ms * 1e3:.0f} | {message_ms:.3f} "
        f"| {runs[0].num_calls:.0f} | {runs[0].num_bytes / 1024:.0f} | {share:.0%} |"
    )


if __name__ == "__main__":
    main()

"""`python -m benchmarks.speculation`: measures speculative decoding and writes the results."""

import argparse
import sys

from benchmarks import results
from benchmarks.machine import description
from benchmarks.report import markdown
from benchmarks.results import Measured
from benchmarks.speculation.service import PART, service

_NAME = "speculation"


def main() -> int:
    options = _options()
    measured = Measured(description(), service(options.rounds, options.tokens))
    print(f"{markdown(measured.part)}\n", flush=True)
    if not options.quick:
        results.write(_NAME, measured, (PART,))
    num_missed = sum(not target.met for target in measured.part.targets)
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=160, help="of each output")
    parser.add_argument("--quick", action="store_true", help="write no results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.gateway`: measures the gateway and writes the results."""

import argparse
import sys
from collections.abc import Callable, Mapping

from benchmarks import results
from benchmarks.gateway.fairness import fairness
from benchmarks.gateway.idle import idle
from benchmarks.gateway.oversized import oversized
from benchmarks.gateway.pauses import pauses
from benchmarks.gateway.protocols import protocols
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured

_NAME = "gateway"


def main() -> int:
    options = _options()
    parts: Mapping[str, Callable[[], Part]] = {
        "protocols": lambda: protocols(options.rounds),
        "idle": lambda: idle(options.streams),
        "fairness": lambda: fairness(options.seconds),
        "pauses": lambda: pauses(options.rounds),
        "oversized": lambda: oversized(options.rounds),
    }
    if unknown := set(options.parts) - set(parts):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    num_missed = 0
    for name in options.parts or parts:
        machine = description()
        measured = Measured(machine, parts[name]())
        print(f"{markdown(measured.part)}\n", flush=True)
        num_missed += sum(not target.met for target in measured.part.targets)
        if not options.quick:
            # After each part, so that a failure loses no finished part.
            results.write(_NAME, measured, tuple(parts))
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="protocols, idle, fairness, pauses, oversized; all"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds of protocols, pauses and oversized"
    )
    parser.add_argument("--streams", type=int, default=2_000, help="streams of idle")
    parser.add_argument("--seconds", type=float, default=60.0, help="of two backlogged tenants")
    parser.add_argument("--quick", action="store_true", help="write no results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.speculation [PART…]`: measures speculative decoding and writes the
results."""

import argparse
import sys

from benchmarks import results
from benchmarks.machine import description
from benchmarks.report import markdown
from benchmarks.results import Measured
from benchmarks.speculation import draft_model, service

_NAME = "speculation"
_PARTS = {service.PART: service.service, draft_model.PART: draft_model.draft_model}


def main() -> int:
    options = _options()
    num_missed = 0
    for name in options.parts or _PARTS:
        measured = Measured(description(), _PARTS[name](options.rounds, options.tokens))
        print(f"{markdown(measured.part)}\n", flush=True)
        if not options.quick:
            results.write(_NAME, measured, tuple(_PARTS))
        num_missed += sum(not target.met for target in measured.part.targets)
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=160, help="of each output")
    parser.add_argument("--quick", action="store_true", help="write no results")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in _PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    sys.exit(main())

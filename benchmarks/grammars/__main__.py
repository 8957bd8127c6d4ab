"""`python -m benchmarks.grammars`: measures structured output and writes the results."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import results
from benchmarks.grammars.guidance import Guidance
from benchmarks.grammars.libraries import libraries
from benchmarks.grammars.new_schemas import new_schemas
from benchmarks.grammars.service import service
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured

_NAME = "grammars"


def main() -> int:
    options = _options()
    parts: Mapping[str, Callable[[], Part]] = {
        "libraries": lambda: libraries(options.python, options.suite),
        "guidance": lambda: Guidance().throughput(options.rounds),
        "delay": lambda: Guidance().delay(options.rounds),
        "service": lambda: service(options.vllm, options.rounds),
        "new-schemas": lambda: new_schemas(options.vllm, options.rounds),
    }
    if unknown := set(options.parts) - set(parts):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    num_missed = 0
    for name in options.parts or parts:
        measured = Measured(description(), parts[name]())
        print(f"{markdown(measured.part)}\n", flush=True)
        num_missed += sum(not target.met for target in measured.part.targets)
        if not options.quick:
            results.write(_NAME, measured, tuple(parts))
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammars", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="libraries, guidance, delay, service, new-schemas; all",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter that has both libraries"
    )
    parser.add_argument(
        "--suite", type=Path, help="the folder of a dialect of JSON-Schema-Test-Suite"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the parts with a model")
    parser.add_argument("--vllm", type=Path, help="environment with vLLM; default: without vLLM")
    parser.add_argument("--quick", action="store_true", help="write no results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

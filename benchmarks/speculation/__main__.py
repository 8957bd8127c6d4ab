"""`python -m benchmarks.speculation [PART…]`: measures speculative decoding and writes the
results."""

import argparse
import sys
from pathlib import Path

from benchmarks import results
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured
from benchmarks.speculation import draft_model, prompt_lookup
from benchmarks.speculation.vllm import Vllm

_NAME = "speculation"
_PARTS = (prompt_lookup.PART, draft_model.PART)


def main() -> int:
    options = _options()
    num_missed = 0
    for name in options.parts or _PARTS:
        measured = Measured(description(), _measure(name, options))
        print(f"{markdown(measured.part)}\n", flush=True)
        if not options.quick:
            results.write(_NAME, measured, _PARTS)
        num_missed += sum(not target.met for target in measured.part.targets)
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _measure(name: str, options: argparse.Namespace) -> Part:
    if name == draft_model.PART:
        return draft_model.draft_model(options.rounds, options.tokens)
    vllm = None
    if options.vllm is not None and (options.vllm / ".installed").exists():
        vllm = Vllm(str(options.vllm / "bin/python"), prompt_lookup.FOLDER)
    else:
        print("vLLM is not installed: it is left out.")
    return prompt_lookup.prompt_lookup(options.rounds, options.tokens, vllm)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=160, help="of each output")
    parser.add_argument("--vllm", type=Path, help="an environment with vLLM; default: none")
    parser.add_argument("--quick", action="store_true", help="write no results")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in _PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    sys.exit(main())

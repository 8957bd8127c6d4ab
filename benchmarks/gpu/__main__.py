"""`python -m benchmarks.gpu`: measures Quire on a GPU and writes the results."""

import argparse
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.gpu.device import CudaDevice, device_description
from benchmarks.gpu.fused import fused
from benchmarks.gpu.kernels import decode, prefill, writes
from benchmarks.gpu.products import products
from benchmarks.gpu.serving import idle, throughput
from benchmarks.gpu.systems import ROOT
from benchmarks.machine import description, moment
from benchmarks.report import Part, markdown
from benchmarks.results import Measured

_NAME = "gpu"
# The tests spend most of their time in Triton's compiler.
_TEST_PROCESSES = "8"
_SHOWN_CHARS = 5000
_KERNEL_TESTS = ROOT / "tests/gpu/test_gpu_kernels.py"


@dataclass(frozen=True)
class Benchmark:
    # Yields the part again with each new row: a part that takes minutes may be interrupted.
    measure: Callable[[Path], Iterable[Part]]
    tests: str | None = None  # kernel tests (pytest -k) that must pass first


def _of_kernel(measure: Callable[[CudaDevice], Part], tests: str) -> Benchmark:
    return Benchmark(lambda _: [measure(CudaDevice())], tests)


PARTS: Mapping[str, Benchmark] = {
    "kv_write": _of_kernel(writes, "writes"),
    "decode": _of_kernel(decode, "attention"),
    "prefill": _of_kernel(prefill, "attention"),
    "products": _of_kernel(products, "products"),
    "fused": _of_kernel(fused, "fused"),
    "idle": Benchmark(idle),
    "throughput": Benchmark(throughput),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if not torch.cuda.is_available():
        print("No GPU found: nothing is measured.")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    machine = {**description(), **device_description()}
    machine["commit"] = options.commit or machine["commit"]
    if options.write and machine["commit"] is None:
        print("not a git repository: pass --commit or --no-write")
        return 2
    passes = cache(_pass)
    failures = 0
    for name in options.parts:
        benchmark = PARTS[name]
        if options.tests and benchmark.tests and not passes(benchmark.tests):
            print(f"{name} is not measured: its tests fail", flush=True)
            failures += 1
            continue
        failures += _measure(benchmark, options, {**machine, **moment()})
    return 1 if failures else 0


def _measure(
    benchmark: Benchmark, options: argparse.Namespace, machine: Mapping[str, object]
) -> int:
    """Measure a part; return the number of missed targets, plus one if the part raised an error."""
    part: Part | None = None
    written: Part | None = None
    failures = 0

    def write(part: Part) -> Part:
        if options.write:
            results.write(_NAME, Measured(machine, part), tuple(PARTS))
        return part

    try:
        for part in benchmark.measure(options.folder):
            # An incomplete table does not replace a complete one.
            if len(part.rows) >= results.num_rows(_NAME, part.name):
                written = write(part)
        if part is not None and part is not written:
            write(part)
    except Exception:
        traceback.print_exc()
        failures = 1
    if part is not None:
        print(f"{markdown(part)}\n", flush=True)
        failures += sum(not target.met for target in part.targets)
    return failures


def _pass(name: str) -> bool:
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", _TEST_PROCESSES, str(_KERNEL_TESTS)]
    done = subprocess.run([*pytest, "-k", name], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-_SHOWN_CHARS:])
    return not done.returncode


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--commit", help="commit to record, outside of a git repository")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".cache/gpu", help="for the model, jobs and logs"
    )
    parser.add_argument(
        "--no-tests", dest="tests", action="store_false", help="do not run the kernels' tests first"
    )
    parser.add_argument(
        "--no-write", dest="write", action="store_false", help="do not write results"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    options.parts = options.parts or list(PARTS)
    return options


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.gpu`: measures what a GPU does, prints, and writes the results."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.gpu.device import CudaDevice, device_description
from benchmarks.gpu.kernels import decode, prefill, writes
from benchmarks.gpu.serving import idle, throughput
from benchmarks.gpu.systems import ROOT
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured

_NAME = "gpu"
_KERNEL_TESTS = ROOT / "tests/gpu/test_gpu_kernels.py"


@dataclass(frozen=True)
class Benchmark:
    measure: Callable[[Path], Part]
    tests: str | None = None  # of the kernels, that must pass before


def _of_kernel(measure: Callable[[CudaDevice], Part], tests: str) -> Benchmark:
    return Benchmark(lambda _: measure(CudaDevice()), tests)


PARTS: Mapping[str, Benchmark] = {
    "kv_write": _of_kernel(writes, "writes"),
    "decode": _of_kernel(decode, "attention"),
    "prefill": _of_kernel(prefill, "attention"),
    "idle": Benchmark(idle),
    "throughput": Benchmark(throughput),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if not torch.cuda.is_available():
        print("No GPU here: nothing is measured.")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name in options.parts:
        benchmark = PARTS[name]
        if options.tests and benchmark.tests and not _pass(benchmark.tests):
            print(f"{name} is not measured: its tests fail", flush=True)
            failures += 1
            continue
        commit = {"commit": options.commit} if options.commit else {}
        machine = {**description(), **device_description(), **commit}
        part = benchmark.measure(options.folder)
        failures += sum(not target.met for target in part.targets)
        print(f"{markdown(part)}\n", flush=True)
        if options.write:
            results.write(_NAME, Measured(machine, part), tuple(PARTS))
    return 1 if failures else 0


def _pass(name: str) -> bool:
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", str(_KERNEL_TESTS), "-k", name]
    return subprocess.run(pytest, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them if absent"
    )
    parser.add_argument("--commit", help="of the code, where there is no repository to ask")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".cache/gpu", help="for the model, jobs and logs"
    )
    parser.add_argument(
        "--no-tests", dest="tests", action="store_false", help="measures without testing before"
    )
    parser.add_argument(
        "--no-write", dest="write", action="store_false", help="leaves the results' files alone"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    options.parts = options.parts or list(PARTS)
    return options


if __name__ == "__main__":
    sys.exit(main())

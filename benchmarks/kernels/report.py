"""Measures the operations whose tests pass, and writes the results."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.kernels.attention import decode, prefill
from benchmarks.kernels.cache import cache_operations
from benchmarks.kernels.inputs import inputs
from benchmarks.kernels.limits import Limits, limits
from benchmarks.kernels.logits import logits
from benchmarks.kernels.products import products
from benchmarks.kernels.sampling import sampling
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured
from kernels.dispatch import choose, cpp_implementations
from worker_svc.service.process import keep_freed_memory

_NAME = "kernels"
_TESTS = Path(__file__).resolve().parents[2] / "tests"


@dataclass(frozen=True)
class Benchmark:
    measure: Callable[[Limits], Part]
    tests: tuple[str, ...]  # files in `tests` that must pass first


PARTS: Mapping[str, Benchmark] = {
    "decode": Benchmark(
        decode, ("kernels/test_kernels_attention.py", "kernels/test_kernels_work_list.py")
    ),
    "prefill": Benchmark(
        prefill, ("kernels/test_kernels_attention.py", "kernels/test_kernels_work_list.py")
    ),
    "cache": Benchmark(
        cache_operations, ("kernels/test_kernels_kv_write.py", "kernels/test_kernels_blocks.py")
    ),
    "products": Benchmark(products, ("kernels/test_kernels_linear.py",)),
    "sampling": Benchmark(sampling, ("kernels/test_kernels_sampling.py",)),
    "logits": Benchmark(logits, ("kernels/test_kernels_logits.py",)),
    "inputs": Benchmark(inputs, ("worker/test_worker_inputs.py",)),
}


def main() -> int:
    options = _options()
    # The same setting as in the worker, also for torch's operations.
    keep_freed_memory()
    if not cpp_implementations():
        print("No C++ kernels available: nothing is measured.")
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    machine_limits = limits()
    print(f"measuring {choose('cpu', [torch.float32])}", flush=True)
    failures = 0
    passed: dict[str, bool] = {}
    for name in options.parts:
        for test in PARTS[name].tests:
            passed[test] = passed[test] if test in passed else _passes(test)
        failing = [test for test in PARTS[name].tests if not passed[test]]
        if failing:
            print(f"{name} is not measured because tests fail: {', '.join(failing)}")
            failures += 1
            continue
        machine = {**description(), "torch": torch.__version__}
        measured = Measured(machine, PARTS[name].measure(machine_limits))
        failures += sum(not target.met for target in measured.part.targets)
        print(f"{markdown(measured.part)}\n", flush=True)
        if options.write:
            results.write(_NAME, measured, tuple(PARTS))
    return 1 if failures else 0


def _passes(test: str) -> bool:
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", str(_TESTS / test)]
    return subprocess.run(pytest, stdout=subprocess.DEVNULL).returncode == 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0: one per core")
    parser.add_argument(
        "--no-write", dest="write", action="store_false", help="do not write results"
    )
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    options.parts = options.parts or list(PARTS)
    return options

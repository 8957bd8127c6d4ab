"""`python -m benchmarks.engines`: compares Quire with other engines and writes the results."""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks import results
from benchmarks.engines.latency import Addresses, latency, loads, measure
from benchmarks.engines.models import MODELS, BenchModel
from benchmarks.engines.plot import plot
from benchmarks.engines.systems import QUIRE, ROOT, VLLM, Bench
from benchmarks.engines.throughput import left_out_if_foreign, run_rounds, throughput
from benchmarks.engines.vllm_server import vllm_server
from benchmarks.engines.worker import worker
from benchmarks.engines.workload import Work, workload
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured

_NAME = "engines"
_KINDS = ("throughput", "worker", "latency")
ORDER = tuple(f"{kind}-{model}" for model in MODELS for kind in _KINDS)
_ALL_REQUESTS, _FEW_REQUESTS = 64, 16
# Exit status of a program ended by a signal, less the signal's number.
_SIGNALLED = 128


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    num_requests: int
    num_rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(_SIGNALLED + received))
    options.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.folder, _python(options.vllm))
    if bench.vllm_python is None:
        print("vLLM is not installed: it is left out.")
    effort = Effort(_FEW_REQUESTS if options.quick else _ALL_REQUESTS, options.rounds)
    num_missed = 0
    for measured in _measured(bench, [MODELS[name] for name in options.models], effort):
        num_missed += sum(not target.met for target in measured.part.targets)
        if not options.quick:
            # After each part, so that a failure loses no finished part.
            results.write(_NAME, measured, ORDER, plot)
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _measured(bench: Bench, models: Sequence[BenchModel], effort: Effort) -> Iterator[Measured]:
    for model in models:
        machine = {**description(), **_versions()}
        for part in _parts(bench, model, effort):
            print(f"{markdown(part)}\n", flush=True)
            yield Measured(machine, part)


def _parts(bench: Bench, model: BenchModel, effort: Effort) -> Iterator[Part]:
    work = Work.of(workload(effort.num_requests))
    with ExitStack() as stack:
        # Started first, so that its start-up time is measured on an idle machine.
        quire = stack.enter_context(bench.start(QUIRE, model, work))
        rounds = run_rounds(bench, model, work, effort.num_rounds, {QUIRE: quire})
        yield throughput(model, work, rounds)
        yield worker(model, rounds.results[QUIRE], quire.call("ready_s"), quire.call("peak_rss_mb"))
        vllm = None
        if bench.vllm_python is not None:
            folder = bench.model_folder(model)
            with left_out_if_foreign(VLLM):
                vllm = stack.enter_context(vllm_server(bench.vllm_python, folder, bench.folder))
        wanted = loads(model, effort.num_requests, effort.num_rounds)
        yield latency(model, measure(Addresses(quire.call("address"), vllm), wanted))


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers")}


def _python(environment: Path | None) -> str | None:
    """Return the Python of vLLM's environment; None if that is incomplete."""
    if environment is None or not (environment / ".installed").exists():
        return None
    return str(environment / "bin/python")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians; default: 3")
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the work; write no results"
    )
    parser.add_argument("--vllm", type=Path, help="environment with vLLM; default: without vLLM")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".cache/engines", help="for models, jobs and logs"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    options.models = options.models or list(MODELS)
    return options


if __name__ == "__main__":
    sys.exit(main())

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
from benchmarks.engines.http_servers import vllm_server
from benchmarks.engines.latency import Addresses, latency, loads, measure
from benchmarks.engines.models import MODELS, SHAPES, TYPED, TYPED_LONG, BenchModel, Shape
from benchmarks.engines.plot import plot
from benchmarks.engines.systems import QUIRE, ROOT, VLLM, Bench
from benchmarks.engines.throughput import left_out_if_foreign, run_rounds, throughput
from benchmarks.engines.types import loads as typed_loads
from benchmarks.engines.types import variants
from benchmarks.engines.types.checkpoints import Checkpoints
from benchmarks.engines.types.environments import Environments
from benchmarks.engines.types.measure import measure_types
from benchmarks.engines.types.start import Setup
from benchmarks.engines.types.table import part_name
from benchmarks.engines.worker import worker
from benchmarks.engines.workload import Work, workload
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured

_NAME = "engines"
_KINDS = ("throughput", "worker", "latency")
ORDER = (
    *(part_name(shape, kind) for shape in (TYPED, TYPED_LONG) for kind in variants.TYPES),
    *(f"{kind}-{model}" for model in MODELS for kind in _KINDS),
)
# By shape: those of a whole run, and of a quick one.
_TYPED_LOADS = {
    TYPED.name: (typed_loads.FULL, typed_loads.QUICK),
    TYPED_LONG.name: (typed_loads.LONG, typed_loads.QUICK_LONG),
}
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
    num_missed = 0
    for measured in _measured(options):
        num_missed += sum(not target.met for target in measured.part.targets)
        if not options.quick:
            # After each part, so that a failure loses no finished part.
            results.write(_NAME, measured, ORDER, plot)
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _measured(options: argparse.Namespace) -> Iterator[Measured]:
    bench = Bench(options.folder, _python(options.vllm))
    if bench.vllm_python is None:
        print("vLLM is not installed: it is left out.")
    effort = Effort(_FEW_REQUESTS if options.quick else _ALL_REQUESTS, options.rounds)
    environments = Environments(
        {
            variants.VLLM: options.vllm,
            variants.LLAMA: options.llama,
            variants.OPENVINO: options.openvino,
        }
    )
    for name in options.models:
        if name in MODELS:
            parts, more = _parts(bench, MODELS[name], effort), {}
        else:
            parts = measure_types(
                _setup(options, bench, SHAPES[name], environments),
                options.systems,
                options.rounds,
            )
            more = environments.versions()
        # Before the first part: the measurements themselves are a load.
        machine = {**description(), **_versions(), **more}
        for part in parts:
            print(f"{markdown(part)}\n", flush=True)
            yield Measured(machine, part)


def _setup(
    options: argparse.Namespace, bench: Bench, shape: Shape, environments: Environments
) -> Setup:
    full, quick = _TYPED_LOADS[shape.name]
    return Setup(
        shape=shape,
        loads=quick if options.quick else full,
        folder=options.folder,
        environments=environments,
        checkpoints=Checkpoints(bench.model_folder(TYPED), environments),
    )


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
        "models", nargs="*", metavar="MODEL", help=f"{', '.join(SHAPES)}; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians; default: 3")
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the work; write no results"
    )
    parser.add_argument(
        "--systems",
        default="",
        metavar="NAME,…",
        help=f"of {TYPED.name} and {TYPED_LONG.name}: "
        f"{', '.join((*variants.ENGINES, *variants.TYPES))}, or one of each as in quire-int8; "
        "default: all",
    )
    parser.add_argument("--vllm", type=Path, help="environment with vLLM; default: without vLLM")
    parser.add_argument("--llama", type=Path, help="llama.cpp, built; default: without it")
    parser.add_argument("--openvino", type=Path, help="environment with it; default: without it")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".cache/engines", help="for models, jobs and logs"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(SHAPES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    options.models = options.models or list(SHAPES)
    try:
        options.systems = variants.chosen([name for name in options.systems.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    sys.exit(main())

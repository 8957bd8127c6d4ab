"""`python -m benchmarks.scheduler`: measures the scheduler and writes the results."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from benchmarks import results
from benchmarks.machine import description
from benchmarks.report import Part, markdown
from benchmarks.results import Measured
from benchmarks.scheduler.arrivals import arrivals
from benchmarks.scheduler.beside import beside
from benchmarks.scheduler.burst import burst
from benchmarks.scheduler.idle import FLEETS, Fleets, idle
from benchmarks.scheduler.memory import memory
from benchmarks.scheduler.prefixes import prefixes
from benchmarks.scheduler.profile import profile
from benchmarks.scheduler.rows import by_rows
from benchmarks.scheduler.scale import fleet, scale
from benchmarks.scheduler.shards import CASES, Case, shards
from benchmarks.scheduler.throughput import Effort, throughput
from benchmarks.scheduler.units import units

_Number = TypeVar("_Number", int, float)
_NAME = "scheduler"
# The measured time of the fleet at rest.
_REST_S = 10.0
# Exit status of a program ended by a signal, less the signal's number.
_SIGNALLED = 128


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    workers: tuple[int, ...] = (1, 4, 16)
    step_ms: tuple[float, ...] = (10.0, 40.0, 160.0)
    # The cases of the shards' aims, beside the products of workers and step_ms.
    pairs: tuple[tuple[int, float], ...] = ((8, 10.0), (16, 25.0))
    rows: tuple[int, ...] = (16, 64, 256, 1024)
    cases: tuple[Case, ...] = CASES
    fleet_workers: int = 64
    rounds: int = 3
    fleets: tuple[Fleets, ...] = FLEETS
    # Workers, shards and schedulers.
    large_fleet: tuple[int, int, int] = (256, 64, 4)
    effort: Effort = field(default_factory=lambda: Effort(num_windows=3, window_s=4.0))
    bursts: int = 5
    waiting: int = 10_000
    requests: int = 1_500


QUICK = Sizes(
    workers=(1, 4),
    step_ms=(10.0,),
    pairs=(),
    rows=(64, 256),
    cases=CASES[:2],
    fleet_workers=8,
    rounds=1,
    fleets=FLEETS[:4],
    large_fleet=(32, 8, 2),
    effort=Effort(1, 2.0),
    bursts=1,
    waiting=1_000,
    requests=300,
)


def _parts(sizes: Sizes) -> Mapping[str, Callable[[], Part]]:
    products = {(workers, step_ms) for workers in sizes.workers for step_ms in sizes.step_ms}
    pairs = sorted(products | {*sizes.pairs})
    return {
        "throughput": lambda: throughput(pairs, 256, sizes.effort),
        "rows": lambda: by_rows(sizes.rows, sizes.effort),
        "arrivals": lambda: arrivals(sizes.effort),
        "burst": lambda: burst(sizes.bursts),
        "memory": lambda: memory(sizes.waiting),
        "prefixes": lambda: prefixes(sizes.requests),
        "shards": lambda: shards(sizes.cases, sizes.fleet_workers, sizes.effort, sizes.rounds),
        "units": lambda: units(sizes.effort),
        "idle": lambda: idle(sizes.fleets),
        "fleet": lambda: fleet(*sizes.large_fleet, results.rows(_NAME, "idle"), _REST_S),
        "scale": lambda: scale(results.rows(_NAME, "units"), results.rows(_NAME, "idle")),
    }


ORDER = tuple(_parts(QUICK))
# `--beside` measures a part of its own.
_ALL = (*ORDER, "beside")


def main() -> int:
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(_SIGNALLED + received))
    if options.profile:
        print(profile(options.profile))
        return 0
    num_missed = 0
    parts = _beside(options) if options.beside else _parts(_sizes(options))
    wanted = list(parts) if options.beside else options.parts
    for measured in _measured(parts, wanted):
        num_missed += sum(not target.met for target in measured.part.targets)
        if not options.quick:
            # After each part, so that a failure loses no finished part.
            results.write(_NAME, measured, _ALL)
    print(f"{num_missed} targets missed" if num_missed else "all targets met")
    return 0


def _beside(options: argparse.Namespace) -> Mapping[str, Callable[[], Part]]:
    sizes, commit = _sizes(options), options.beside
    return {"beside": lambda: beside(commit, sizes.rows, sizes.effort, sizes.rounds)}


def _measured(parts: Mapping[str, Callable[[], Part]], wanted: list[str]) -> Iterator[Measured]:
    for name in wanted:
        measured = Measured(description(), parts[name]())
        print(f"{markdown(measured.part)}\n", flush=True)
        yield measured


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(ORDER)}; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="about a minute; write no results")
    parser.add_argument("--workers", type=_numbers(int), help="such as 1,4,16")
    parser.add_argument("--step-ms", type=_numbers(float), help="such as 10,40,160")
    parser.add_argument(
        "--pairs", type=_pairs, help="more cases of the part throughput, such as 8:10"
    )
    parser.add_argument(
        "--cases",
        type=_cases,
        help="shards and schedulers in the part shards, such as 4:4,8:1",
    )
    parser.add_argument("--fleet-workers", type=int, help="workers in the part shards")
    parser.add_argument("--rows", type=_numbers(int), help="such as 16,64,256,1024")
    parser.add_argument(
        "--windows", type=int, help="number of windows, of which figures are medians"
    )
    parser.add_argument("--window-s", type=float, help="seconds per window")
    parser.add_argument("--bursts", type=int, help="number of bursts, of which figures are medians")
    parser.add_argument("--waiting", type=int, help="waiting requests in the part memory")
    parser.add_argument("--requests", type=int, help="requests in the part prefixes")
    parser.add_argument(
        "--beside", metavar="COMMIT", help="measure the time per step beside that of a commit"
    )
    parser.add_argument(
        "--rounds", type=int, help="measurements of each tree with --beside, of each case of shards"
    )
    parser.add_argument(
        "--profile", type=float, metavar="SECONDS", help="profile the scheduler instead"
    )
    options = parser.parse_args()
    if unknown := set(options.parts) - set(ORDER):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    options.parts = options.parts or list(ORDER)
    return options


def _sizes(options: argparse.Namespace) -> Sizes:
    sizes = QUICK if options.quick else Sizes()
    given = {k: v for k, v in vars(options).items() if v is not None and hasattr(sizes, k)}
    effort = sizes.effort
    return replace(
        sizes,
        effort=Effort(options.windows or effort.num_windows, options.window_s or effort.window_s),
        **given,
    )


def _pairs(text: str) -> tuple[tuple[int, float], ...]:
    pairs = (pair.split(":") for pair in text.split(","))
    return tuple((int(first), float(second)) for first, second in pairs)


def _cases(text: str) -> tuple[Case, ...]:
    return tuple(Case(first, int(second)) for first, second in _pairs(text))


def _numbers(kind: type[_Number]) -> Callable[[str], tuple[_Number, ...]]:
    def parse(text: str) -> tuple[_Number, ...]:
        return tuple(kind(part) for part in text.split(","))

    return parse


if __name__ == "__main__":
    sys.exit(main())

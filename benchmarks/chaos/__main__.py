"""`python -m benchmarks.chaos`: checks that nothing is lost when parts of the service fail."""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import results
from benchmarks.chaos.events import Events
from benchmarks.chaos.experiment import Outcome, Plan, run
from benchmarks.chaos.faults import FAULTS, Fault
from benchmarks.chaos.joined import joined, save
from benchmarks.chaos.stack import SETTINGS, Sizes
from benchmarks.chaos.tables import PARTS, part_of_run
from benchmarks.machine import description
from benchmarks.report import markdown
from benchmarks.results import Measured

_ROOT = Path(__file__).parents[2]
_LARGEST_SEED = 2**32
_REDIS = ("single", "cluster")
_SIZES = "--tensor-parallel-size or --pipeline-parallel-size"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if nothing was lost, repeated, changed, failed or left behind; 1 otherwise."""
    options = _options(arguments)
    plan = _plan(options)
    plan.logs.mkdir(parents=True, exist_ok=True)
    events = Events(plan.logs / "events.log")
    machine = description()
    outcome = Outcome()
    if plan.times or plan.raise_shards_to or not options.join:
        outcome = asyncio.run(run(plan, events))
        save(outcome, plan.logs)
    outcome = joined(outcome, options.join)
    measured = Measured(machine, part_of_run(plan, outcome))
    print(f"\n{markdown(measured.part)}\n")
    for violation in outcome.violations:
        print(f"VIOLATION: {violation}")
    if options.write:
        results.write("chaos", measured, PARTS)
    verdict = "nothing is lost" if outcome.is_clean else "NOT CLEAN"
    events.log(f"seed {plan.seed}: {verdict}; logs are in {plan.logs}")
    return 0 if outcome.is_clean else 1


def plan_of(arguments: Sequence[str]) -> Plan:
    """That of the command's arguments. SystemExit if they are wrong."""
    return _plan(_options(arguments))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    names = [fault.name for fault in FAULTS]
    parser.add_argument(
        "faults", nargs="*", metavar="FAULT", help=f"{', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--times", type=int, default=25, help="injections of each fault; default: 25"
    )
    parser.add_argument("--engine", choices=list(SETTINGS), default="sim")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="ranks of a worker, or of each of its stages, with the engine demo; several have "
        "faults of their own",
    )
    parser.add_argument(
        "--pipeline-parallel-size",
        type=int,
        default=1,
        help="stages of a worker, with the engine demo",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=0,
        help="drafts of a row in a step; the references have none; default: 0",
    )
    parser.add_argument(
        "--speculative-model", help="a draft model's folder; default: drafts by prompt lookup"
    )
    parser.add_argument("--gateways", type=int, default=2, help="default: 2")
    parser.add_argument("--schedulers", type=int, default=2, help="default: 2")
    parser.add_argument("--workers", type=int, default=3, help="default: 3")
    parser.add_argument("--shards", type=int, default=1, help="at the start; default: 1")
    parser.add_argument(
        "--raise-shards-to",
        type=int,
        metavar="SHARDS",
        help="under load, before the first fault; with --times 0 there are no faults",
    )
    parser.add_argument(
        "--redis",
        choices=_REDIS,
        default="single",
        help="a server, or a cluster of three primaries with a replica each; default: single",
    )
    parser.add_argument("--seed", type=int, help="for requests and times; default: random")
    parser.add_argument("--streams", type=int, default=32, help="concurrent streams; default: 32")
    parser.add_argument("--requests", type=int, default=96, help="distinct requests; default: 96")
    parser.add_argument(
        "--model", default=str(_ROOT / "demo/model"), help="default: the demo model"
    )
    parser.add_argument(
        "--bound-s", type=float, default=60.0, help="limit of a recovery; default: 60"
    )
    parser.add_argument("--logs", type=Path, help="default: a folder in .cache/chaos")
    parser.add_argument(
        "--join",
        type=Path,
        nargs="+",
        default=[],
        metavar="LOGS",
        help="folders of earlier runs, whose figures are added to the table; with --times 0 the "
        "table is theirs",
    )
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args(arguments)
    if options.speculative_model and not options.num_speculative_tokens:
        parser.error("--speculative-model needs --num-speculative-tokens")
    if unknown := set(options.faults) - set(names):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if _has_ranks(options) and options.engine == "sim":
        parser.error(f"{_SIZES} needs --engine=demo: simulated workers have no ranks")
    for fault in FAULTS:
        if fault.name in options.faults and (missing := _missing(fault, options)):
            parser.error(f"{fault.name}: needs {missing}")
    if options.gateways < 2 or options.workers < 2:
        parser.error("--gateways and --workers: at least 2, of which one is killed")
    if options.raise_shards_to is not None and options.raise_shards_to <= options.shards:
        parser.error("--raise-shards-to: more than --shards")
    return options


def _has_ranks(options: argparse.Namespace) -> bool:
    sizes: list[int] = [options.tensor_parallel_size, options.pipeline_parallel_size]
    return max(sizes) > 1


def _missing(fault: Fault, options: argparse.Namespace) -> str | None:
    """Return the options without which there is nothing for the fault to hit."""
    if fault.is_of_ranks and not _has_ranks(options):
        return _SIZES
    if fault.is_of_shards and min(_num_shards(options), options.schedulers) < 2:
        return "--shards or --raise-shards-to"
    if fault.is_of_redis_cluster and options.redis != "cluster":
        return "--redis cluster"
    return None


def _num_shards(options: argparse.Namespace) -> int:
    """During the faults."""
    return int(options.raise_shards_to or options.shards)


def _faults(options: argparse.Namespace) -> list[Fault]:
    possible = [fault for fault in FAULTS if _missing(fault, options) is None]
    return [fault for fault in possible if not options.faults or fault.name in options.faults]


def _plan(options: argparse.Namespace) -> Plan:
    seed = options.seed if options.seed is not None else random.randrange(_LARGEST_SEED)
    began = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Plan(
        model=options.model,
        engine=options.engine,
        seed=seed,
        faults=_faults(options),
        times=options.times,
        num_streams=options.streams,
        num_requests=options.requests,
        bound_s=options.bound_s,
        num_speculative_tokens=options.num_speculative_tokens,
        speculative_model=options.speculative_model,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        sizes=Sizes(options.gateways, options.schedulers, options.workers, options.shards),
        raise_shards_to=options.raise_shards_to,
        has_redis_cluster=options.redis == "cluster",
        logs=options.logs or _ROOT / f".cache/chaos/{began}-{seed}",
    )


if __name__ == "__main__":
    sys.exit(main())

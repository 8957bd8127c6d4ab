"""Throughput: all requests at once, on every system, in several rounds."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.engines.host import EngineError, Host
from benchmarks.engines.models import BenchModel
from benchmarks.engines.systems import (
    GENERATE,
    PRODUCTS,
    QUIRE,
    RUNNER,
    SYSTEMS,
    VLLM,
    Bench,
    System,
)
from benchmarks.engines.workload import Work
from benchmarks.report import Cell, Column, Part, Target
from quire.bench.report import equality

# Least ratio of the first system's speed to the second's.
_RATIOS = (
    (QUIRE, VLLM, 1.15),
    (QUIRE, GENERATE, 1.9),
    (QUIRE, RUNNER, 0.93),
)
_OF_PRODUCTS = 1.4


@dataclass(frozen=True)
class Rounds:
    """Results of the work: one per system and round."""

    results: Mapping[System, Sequence[Mapping[str, Any]]]
    vllm_version: str | None

    def seconds(self, system: System) -> float | None:
        """Return the median over the rounds; None without the system."""
        found = self.results.get(system)
        return median(result["seconds"] for result in found) if found else None

    def outputs(self, system: System) -> Sequence[Sequence[int]] | None:
        """Return the tokens of the first round; None if the system generates none."""
        found = self.results.get(system)
        return found[0].get("outputs") if found else None

    def ratio(self, faster: System, slower: System) -> float | None:
        """Return the median of the rounds' speed ratios. Within a round, a slow machine slows both
        systems."""
        pairs = zip(self.results.get(faster, ()), self.results.get(slower, ()), strict=False)
        ratios = [other["seconds"] / one["seconds"] for one, other in pairs]
        return median(ratios) if ratios else None


def run_rounds(
    bench: Bench,
    model: BenchModel,
    work: Work,
    num_rounds: int,
    started: Mapping[System, Host],
) -> Rounds:
    """Start the systems not in `started` and run all rounds. A foreign system that does not start
    is left out. EngineError if a system fails."""
    with ExitStack() as stack:
        hosts = dict(started)
        for system in SYSTEMS:
            if system not in hosts and bench.has(system):
                with left_out_if_foreign(system):
                    hosts[system] = stack.enter_context(bench.start(system, model, work))
        for host in hosts.values():
            host.call("warm")
        results = [_round(hosts, number) for number in range(num_rounds)]
        version = hosts[VLLM].call("version") if VLLM in hosts else None
    return Rounds({system: [one[system] for one in results] for system in hosts}, version)


@contextmanager
def left_out_if_foreign(system: System) -> Iterator[None]:
    """Suppress the EngineError of a foreign system that does not start."""
    try:
        yield
    except EngineError as error:
        if not system.is_foreign:
            raise
        print(f"{system.short} is left out: {error}", flush=True)


def _round(hosts: Mapping[System, Host], number: int) -> dict[System, Mapping[str, Any]]:
    """Run the systems one after the other while the others are idle. The order alternates between
    rounds, so that a machine that becomes slower or faster favours no system."""
    order = list(hosts)[:: -1 if number % 2 else 1]
    return {system: hosts[system].call("run") for system in order}


def throughput(model: BenchModel, work: Work, rounds: Rounds) -> Part:
    """Build the table. EngineError if a system has not done all the work in some round."""
    _require_the_work(work, rounds)
    return Part(
        name=f"throughput-{model.name}",
        title=f"Throughput, {model.size}",
        notes=[_setting(work, rounds), _READING, _products_note(rounds)],
        columns=_COLUMNS,
        rows=[_row(system, work, rounds) for system in SYSTEMS if system in rounds.results],
        targets=[*_ratio_targets(rounds), *_product_targets(rounds)],
    )


def _require_the_work(work: Work, rounds: Rounds) -> None:
    for system, results in rounds.results.items():
        for result in results:
            written = [len(tokens) for tokens in result.get("outputs") or ()]
            if written and written != list(work.num_outputs):
                raise EngineError(
                    f"{system.title} generated {sum(written):,} tokens instead of "
                    f"{work.num_output_tokens:,}, or outputs of other lengths"
                )


_COLUMNS = [
    Column("system", "system"),
    Column("tokens_per_s", "output tokens/s", ",.0f"),
    Column("seconds", "seconds, median", ".2f"),
    Column("fastest", "fastest", ".2f"),
    Column("slowest", "slowest", ".2f"),
    Column("ratio", "speed-up of Quire", ".2f"),
    Column("equal", "equal tokens", ".1%"),
]
_READING = (
    "Speed-ups are medians of the rounds' ratios. *Equal tokens* is the share of tokens before the "
    "first difference from Quire's output: greedy outputs in fp32 may diverge where two tokens are "
    "nearly equally likely."
)


def _setting(work: Work, rounds: Rounds) -> str:
    num_rounds = len(next(iter(rounds.results.values())))
    vllm = "" if rounds.vllm_version is None else f", vLLM {rounds.vllm_version}"
    return (
        f"{len(work.prompts)} prompts with {sum(map(len, work.prompts)):,} tokens, "
        f"{work.num_output_tokens:,} output tokens; all at once, greedy, fp32, on all cores; "
        f"rounds in which every system does the work once: {num_rounds}{vllm}."
    )


def _products_note(rounds: Rounds) -> str:
    found, runner_s = rounds.results[PRODUCTS], rounds.seconds(RUNNER)
    flops = found[0]["flops"]
    torch, ours = (
        median(result[name] for result in found) for name in ("torch_flops_per_s", "flops_per_s")
    )
    share = f"; the runner takes {runner_s * ours / flops:.2f} times that" if runner_s else ""
    return (
        f"The matrix products are {flops / 1e12:.2f} TFLOP. In a step with the full token budget "
        f"torch reaches {torch / 1e9:.0f} GFLOP/s in float32, which would be {flops / torch:.2f} s "
        f"for all of them, and the runner's kernel {ours / 1e9:.0f} GFLOP/s, which would be "
        f"{flops / ours:.2f} s{share}. The last row is the time of that kernel in the runner's "
        "steps."
    )


def _row(system: System, work: Work, rounds: Rounds) -> dict[str, Cell]:
    seconds = [float(result["seconds"]) for result in rounds.results[system]]
    ours, theirs = rounds.outputs(QUIRE), rounds.outputs(system)
    equal = equality(ours, theirs) if ours and theirs and system != QUIRE else None
    return {
        "system": system.title,
        "tokens_per_s": work.num_output_tokens / median(seconds),
        "seconds": median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "ratio": rounds.ratio(QUIRE, system),
        "equal": None if equal is None else equal.tokens,
        "equal_requests": None if equal is None else equal.requests,
    }


def _ratio_targets(rounds: Rounds) -> list[Target]:
    found = []
    for faster, slower, aim in _RATIOS:
        if (ratio := rounds.ratio(faster, slower)) is not None:
            what = f"speed-up of {faster.short} over {slower.short}"
            found.append(Target(what, f"at least {aim:g}", f"{ratio:.2f}", ratio >= aim))
    return found


def _product_targets(rounds: Rounds) -> list[Target]:
    """Compare the runner alone with two measures of the matrix products' time."""
    runner_s, products = rounds.seconds(RUNNER), rounds.results[PRODUCTS]
    if runner_s is None:
        return []
    at_rate_s = median(result["flops"] / result["torch_flops_per_s"] for result in products)
    in_steps_s = median(result["seconds"] for result in products)
    return [
        Target(
            f"the runner's time over the matrix products' {how}",
            f"at most {_OF_PRODUCTS:g}",
            f"{runner_s / seconds:.2f}",
            runner_s / seconds <= _OF_PRODUCTS,
        )
        for how, seconds in (
            ("at torch's rate", at_rate_s),
            ("by its own kernel in its steps", in_steps_s),
        )
    ]

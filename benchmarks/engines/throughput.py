"""Throughput: all requests at once, through every system, round after round."""

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
from quire.bench.equality import equality

# What one system is to be of another one's speed, at least.
_RATIOS = (
    (QUIRE, VLLM, 1.15),
    (QUIRE, GENERATE, 1.9),
    (QUIRE, RUNNER, 0.93),
)
_OF_PRODUCTS = 1.4


@dataclass(frozen=True)
class Rounds:
    """What came of the work, per system one answer a round."""

    answers: Mapping[System, Sequence[Mapping[str, Any]]]
    vllm_version: str | None

    def seconds(self, system: System) -> float | None:
        """The median round's; None without the system."""
        found = self.answers.get(system)
        return median(answer["seconds"] for answer in found) if found else None

    def outputs(self, system: System) -> Sequence[Sequence[int]] | None:
        """The first round's tokens; None for what writes none."""
        found = self.answers.get(system)
        return found[0].get("outputs") if found else None

    def ratio(self, faster: System, slower: System) -> float | None:
        """How many times as fast, by the median of the rounds' own ratios: a slow moment of the
        machine is one for both."""
        pairs = zip(self.answers.get(faster, ()), self.answers.get(slower, ()), strict=False)
        ratios = [other["seconds"] / one["seconds"] for one, other in pairs]
        return median(ratios) if ratios else None


def run_rounds(
    bench: Bench,
    model: BenchModel,
    work: Work,
    num_rounds: int,
    started: Mapping[System, Host],
) -> Rounds:
    """Starts whatever of the systems is not there yet; what is not ours is left out if it does not
    start. EngineError if a system fails."""
    with ExitStack() as stack:
        hosts = dict(started)
        for system in SYSTEMS:
            if system not in hosts and bench.has(system):
                with left_out_if_foreign(system):
                    hosts[system] = stack.enter_context(bench.start(system, model, work))
        for host in hosts.values():
            host.ask("warm")
        answers = [_round(hosts, number) for number in range(num_rounds)]
        version = hosts[VLLM].ask("version") if VLLM in hosts else None
    return Rounds({system: [one[system] for one in answers] for system in hosts}, version)


@contextmanager
def left_out_if_foreign(system: System) -> Iterator[None]:
    """A start that may fail without ending everything, if the system is not ours."""
    try:
        yield
    except EngineError as error:
        if not system.is_foreign:
            raise
        print(f"{system.short} is left out: {error}", flush=True)


def _round(hosts: Mapping[System, Host], number: int) -> dict[System, Mapping[str, Any]]:
    """One after the other, while the others sleep; in turns from either end, so that a machine
    that gets slower or faster favours nobody."""
    order = list(hosts)[:: -1 if number % 2 else 1]
    return {system: hosts[system].ask("run") for system in order}


def throughput(model: BenchModel, work: Work, rounds: Rounds) -> Part:
    """EngineError if a system has not done the work in some round."""
    _require_the_work(work, rounds)
    return Part(
        name=f"throughput-{model.name}",
        title=f"Throughput, {model.size}",
        notes=[_setting(work, rounds), _READING, _products_note(rounds)],
        columns=_COLUMNS,
        rows=[_row(system, work, rounds) for system in SYSTEMS if system in rounds.answers],
        targets=[*_ratio_targets(rounds), *_product_targets(rounds)],
    )


def _require_the_work(work: Work, rounds: Rounds) -> None:
    for system, answers in rounds.answers.items():
        for answer in answers:
            written = [len(tokens) for tokens in answer.get("outputs") or ()]
            if written and written != list(work.num_outputs):
                raise EngineError(
                    f"{system.title} wrote {sum(written):,} tokens, "
                    f"{work.num_output_tokens:,} in other lengths were asked for"
                )


_COLUMNS = [
    Column("system", "system"),
    Column("tokens_per_s", "output tokens/s", ",.0f"),
    Column("seconds", "seconds, median", ".2f"),
    Column("fastest", "fastest", ".2f"),
    Column("slowest", "slowest", ".2f"),
    Column("ratio", "Quire is so many times as fast", ".2f"),
    Column("equal", "equal tokens", ".1%"),
]
_READING = (
    "Ratios are medians of the rounds' own. *Equal tokens* are those before the first that differs "
    "from Quire's, of all: greedy outputs in fp32 may part where two tokens are as good as equal."
)


def _setting(work: Work, rounds: Rounds) -> str:
    num_rounds = len(next(iter(rounds.answers.values())))
    vllm = "" if rounds.vllm_version is None else f", vLLM {rounds.vllm_version}"
    return (
        f"{len(work.prompts)} prompts with {sum(map(len, work.prompts)):,} tokens, "
        f"{work.num_output_tokens:,} tokens of output; all at once, greedy, fp32, on all cores; "
        f"rounds in which every system does the work once: {num_rounds}{vllm}."
    )


def _products_note(rounds: Rounds) -> str:
    found, runner_s = rounds.answers[PRODUCTS], rounds.seconds(RUNNER)
    flops = found[0]["flops"]
    torch, ours = (
        median(answer[name] for answer in found) for name in ("torch_flops_per_s", "flops_per_s")
    )
    beside = f", of which the runner takes {runner_s * ours / flops:.2f} times" if runner_s else ""
    return (
        f"The matrix products are {flops / 1e12:.2f} TFLOP. torch runs those of a step of the full "
        f"budget at {torch / 1e9:.0f} GFLOP/s in float32, at which all of them would take "
        f"{flops / torch:.2f} s; the runner's kernel at {ours / 1e9:.0f}, which would be "
        f"{flops / ours:.2f} s{beside}. The last line is what they take by that kernel in steps as "
        "the runner has them."
    )


def _row(system: System, work: Work, rounds: Rounds) -> dict[str, Cell]:
    seconds = [float(answer["seconds"]) for answer in rounds.answers[system]]
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
            what = f"{faster.short}, times as fast as {slower.short}"
            found.append(Target(what, f"at least {aim:g}", f"{ratio:.2f}", ratio >= aim))
    return found


def _product_targets(rounds: Rounds) -> list[Target]:
    """Of the runner alone, by two readings of what the products take."""
    runner_s, products = rounds.seconds(RUNNER), rounds.answers[PRODUCTS]
    if runner_s is None:
        return []
    at_rate_s = median(answer["flops"] / answer["torch_flops_per_s"] for answer in products)
    in_steps_s = median(answer["seconds"] for answer in products)
    return [
        Target(
            f"the runner's time, of the matrix products' {how}",
            f"at most {_OF_PRODUCTS:g}",
            f"{runner_s / seconds:.2f}",
            runner_s / seconds <= _OF_PRODUCTS,
        )
        for how, seconds in (
            ("at torch's rate", at_rate_s),
            ("by its own kernel in its steps", in_steps_s),
        )
    ]

"""The findings of a run as tables."""

from benchmarks.chaos.experiment import Outcome, Plan, Recovered
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.gaps import Spread, threshold_s
from benchmarks.report import Cell, Column, Part, Target

_COLUMNS = [
    Column("fault", "fault"),
    Column("times", "times", "d"),
    Column("steady_s", "recovery, median s", ".1f"),
    Column("affected", "streams with a gap", "d"),
    Column("p50_s", "p50 s", ".2f"),
    Column("p99_s", "p99", ".2f"),
    Column("max_s", "max", ".2f"),
    Column("alive", "streams alive", "d"),
    Column("all_p50_s", "p50", ".2f"),
    Column("all_p99_s", "p99", ".2f"),
    Column("recovered", "tokens recovered", "d"),
    Column("computed", "recomputed", "d"),
]
_ENGINES = {
    "sim": "simulated workers",
    "demo": "the demo model in fp32 on the CPU",
}


def part_of_run(plan: Plan, outcome: Outcome) -> Part:
    least_s = threshold_s(outcome.baseline)
    injected = [fault for fault in plan.faults if fault.name in outcome.pauses]
    return Part(
        name=plan.engine,
        title=f"Gaps by fault, with {_ENGINES[plan.engine]}",
        notes=[_summary(plan, outcome), _reading(least_s)],
        columns=_COLUMNS,
        rows=[_row(fault, outcome, least_s) for fault in injected],
        targets=[
            *(_nothing(verdict.value, count) for verdict, count in outcome.num_wrong.items()),
            _nothing("left behind, or ended without a fault", len(outcome.violations)),
            *(_aim(fault, outcome, least_s) for fault in injected if _has_aim(fault, plan)),
        ],
    )


def _summary(plan: Plan, outcome: Outcome) -> str:
    num_faults = sum(map(len, outcome.recoveries.values()))
    return (
        f"Two schedulers, three workers{_ranks(plan)}, two gateways and Redis; "
        f"{plan.num_streams} streams always open; {num_faults} faults at times drawn from seed "
        f"{plan.seed}. "
        f"{outcome.num_requests:,} streams with {outcome.num_tokens:,} tokens were compared, token "
        "by token, with the same requests without faults; clients cancelled "
        f"{outcome.num_cancelled:,} of them."
        f"{_speculation(plan, outcome)}"
    )


def _ranks(plan: Plan) -> str:
    sizes = [(plan.pipeline_parallel_size, "stages"), (plan.tensor_parallel_size, "ranks")]
    several = [f" of {size} {what}" for size, what in sizes if size > 1]
    return "".join([*several, " each"]) if several else ""


def _speculation(plan: Plan, outcome: Outcome) -> str:
    if not plan.num_speculative_tokens or outcome.decoded is None:
        return ""
    drafter = "a draft model" if plan.speculative_model else "prompt lookup"
    return (
        f" The streams had up to {plan.num_speculative_tokens} drafts of {drafter} in a step, of "
        f"which {outcome.decoded.acceptance:.0%} were accepted; the requests without faults had "
        "none."
    )


def _reading(least_s: float) -> str:
    return (
        "A gap is a stream's longest pause between two messages that overlaps the time from the "
        "fault to the steady state. Left: streams whose gap was clearly longer than without faults "
        f"({least_s:.2f} s or more); right: all streams alive at that time. Recovered tokens are "
        "those, prompt and output, of sequences that had started and were admitted again, on the "
        "same or another worker; those of them that were not cached were recomputed."
    )


def _row(fault: Fault, outcome: Outcome, least_s: float) -> dict[str, Cell]:
    pauses = outcome.pauses[fault.name]
    affected, every = Spread.of(_affected(pauses, least_s)), Spread.of(pauses)
    recoveries = outcome.recoveries.get(fault.name, [])
    recovered = outcome.recovered.get(fault.name, Recovered())
    return {
        "fault": fault.what,
        "times": len(recoveries),
        "steady_s": Spread.of(recoveries).p50_s,
        "affected": affected.count,
        "p50_s": affected.p50_s,
        "p99_s": affected.p99_s,
        "max_s": affected.max_s,
        "alive": every.count,
        "all_p50_s": every.p50_s,
        "all_p99_s": every.p99_s,
        "recovered": recovered.num_tokens,
        "computed": recovered.num_tokens - recovered.num_cached,
    }


def _affected(pauses: list[float], least_s: float) -> list[float]:
    return [pause for pause in pauses if pause >= least_s]


def _has_aim(fault: Fault, plan: Plan) -> bool:
    """Return whether the target applies; loading a real model takes CPU time from the others."""
    return fault.aim_s is not None and plan.engine == "sim"


def _aim(fault: Fault, outcome: Outcome, least_s: float) -> Target:
    gaps = Spread.of(_affected(outcome.pauses[fault.name], least_s))
    aim_s, what = fault.aim_s or 0.0, f"{fault.what}: p99 of the gaps"
    if gaps.p99_s is None:
        return Target(what, f"at most {aim_s:g} s", "no gaps", True)
    return Target(what, f"at most {aim_s:g} s", f"{gaps.p99_s:.2f} s", gaps.p99_s <= aim_s)


def _nothing(what: str, count: int) -> Target:
    return Target(what, "0", str(count), count == 0)

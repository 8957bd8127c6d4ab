"""The findings of a run as tables."""

from benchmarks.chaos.experiment import SHARDS_RAISED, Outcome, Plan, Recovered
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
    Column("first_p99_s", "first message, p99", ".2f"),
    Column("recovered", "tokens recovered", "d"),
    Column("computed", "recomputed", "d"),
]
_OF_SHARDS = [
    Column("fault", "fault"),
    Column("times", "times", "d"),
    Column("steady_s", "recovery, median s", ".1f"),
    Column("hit", "streams of its shards", "d"),
    Column("hit_p50_s", "p50 s", ".2f"),
    Column("hit_p99_s", "p99", ".2f"),
    Column("hit_max_s", "max", ".2f"),
    Column("others", "other streams", "d"),
    Column("others_p99_s", "p99", ".2f"),
    Column("others_max_s", "max", ".2f"),
    Column("first_p99_s", "first message, p99", ".2f"),
    Column("recovered", "tokens recovered", "d"),
    Column("computed", "recomputed", "d"),
]
# In the order of the page.
PARTS = ("sim", "shards", "redis-cluster", "demo")
# The gaps of streams whose shard is led by a process that goes on.
_OTHERS_AIM_S = 0.2
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ENGINES = {
    "sim": "simulated workers",
    "demo": "the demo model in fp32 on the CPU",
}


def part_of_run(plan: Plan, outcome: Outcome) -> Part:
    least_s = threshold_s(outcome.baseline)
    injected = [fault for fault in plan.faults if fault.name in outcome.pauses]
    has_shards = plan.num_shards > 1
    raised = [] if plan.raise_shards_to is None else [_raised(plan, outcome)]
    return Part(
        name=_name(plan),
        title=f"Gaps by fault, with {_title(plan)}",
        notes=[
            _summary(plan, outcome),
            _reading_of_shards(outcome) if has_shards else _reading(outcome, least_s),
        ],
        columns=_OF_SHARDS if has_shards else _COLUMNS,
        rows=[*raised, *(_row(fault, outcome, least_s) for fault in injected)],
        targets=[
            *(_nothing(verdict.value, count) for verdict, count in outcome.num_wrong.items()),
            _nothing("left behind, or ended without a fault", len(outcome.violations)),
            *(
                target
                for fault in injected
                if _has_aim(fault, plan)
                for target in (
                    _aims_of_shards(fault, outcome)
                    if has_shards
                    else [_aim(fault, outcome, least_s)]
                )
            ),
        ],
    )


def _name(plan: Plan) -> str:
    if plan.has_redis_cluster:
        return "redis-cluster"
    return "shards" if plan.num_shards > 1 else plan.engine


def _title(plan: Plan) -> str:
    several = f" in {_number(plan.num_shards)} shards" if plan.num_shards > 1 else ""
    return f"{_ENGINES[plan.engine]}{several}{' and a Redis Cluster' * plan.has_redis_cluster}"


def _number(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def _summary(plan: Plan, outcome: Outcome) -> str:
    num_faults = sum(map(len, outcome.recoveries.values()))
    sizes = plan.sizes
    servers = "a Redis Cluster of three primaries with a replica each"
    return (
        f"{_number(sizes.num_schedulers).capitalize()} schedulers, "
        f"{_number(sizes.num_workers)} workers{_ranks(plan)}, {_number(sizes.num_gateways)} "
        f"gateways and {servers if plan.has_redis_cluster else 'Redis'}; "
        f"{plan.num_streams} streams always open; {num_faults} faults at times drawn from seed "
        f"{plan.seed}. "
        f"{outcome.num_requests:,} streams with {outcome.num_tokens:,} tokens were compared, token "
        "by token, with the same requests without faults; clients cancelled "
        f"{outcome.num_cancelled:,} of them."
        f"{_speculation(plan, outcome)}"
    )


def _reading_of_shards(outcome: Outcome) -> str:
    usual = Spread.of(outcome.baseline)
    return (
        "A gap is a stream's longest pause between two messages that overlaps the time from the "
        "fault to the steady state. Left: streams whose shard the fault has hit, that of a worker, "
        "those of a scheduler that led them, or all of them for Redis; right: all others. A worker "
        "pauses the streams that it ran, so not all of its shard. Without faults the longest "
        f"pauses had a p99 of {usual.p99_s or 0:.2f} s and a maximum of {usual.max_s or 0:.2f} s."
        f"{_reading_of_first(outcome)}"
    )


def _reading_of_first(outcome: Outcome) -> str:
    usual = Spread.of(outcome.baseline_first)
    return (
        " First message: the time until then of all requests that waited for it in that time; "
        f"without faults its p99 was {usual.p99_s or 0:.2f} s."
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


def _reading(outcome: Outcome, least_s: float) -> str:
    return (
        "A gap is a stream's longest pause between two messages that overlaps the time from the "
        "fault to the steady state. Left: streams whose gap was clearly longer than without faults "
        f"({least_s:.2f} s or more); right: all streams alive at that time. Recovered tokens are "
        "those, prompt and output, of sequences that had started and were admitted again, on the "
        "same or another worker; those of them that were not cached were recomputed."
        f"{_reading_of_first(outcome)}"
    )


def _row(fault: Fault, outcome: Outcome, least_s: float) -> dict[str, Cell]:
    recovered = outcome.recovered.get(fault.name, Recovered())
    return {
        "fault": fault.what,
        **_figures(fault.name, outcome, least_s),
        "recovered": recovered.num_tokens,
        "computed": recovered.num_tokens - recovered.num_cached,
    }


def _raised(plan: Plan, outcome: Outcome) -> dict[str, Cell]:
    """The row of the number of shards, which is raised under load."""
    what = f"{plan.sizes.num_shards} to {plan.raise_shards_to} shards"
    return {"fault": what, **_figures(SHARDS_RAISED, outcome, threshold_s(outcome.baseline))}


def _figures(name: str, outcome: Outcome, least_s: float) -> dict[str, Cell]:
    pauses = outcome.pauses.get(name, [])
    recoveries = outcome.recoveries.get(name, [])
    affected, every = Spread.of(_affected(pauses, least_s)), Spread.of(pauses)
    hit, others = _by_shard(name, outcome)
    return {
        "times": len(recoveries),
        "steady_s": Spread.of(recoveries).p50_s,
        "affected": affected.count,
        "p50_s": affected.p50_s,
        "p99_s": affected.p99_s,
        "max_s": affected.max_s,
        "alive": every.count,
        "all_p50_s": every.p50_s,
        "all_p99_s": every.p99_s,
        "first_p99_s": Spread.of(outcome.first_waits.get(name, [])).p99_s,
        "hit": hit.count,
        "hit_p50_s": hit.p50_s,
        "hit_p99_s": hit.p99_s,
        "hit_max_s": hit.max_s,
        "others": others.count,
        "others_p99_s": others.p99_s,
        "others_max_s": others.max_s,
    }


def _by_shard(name: str, outcome: Outcome) -> tuple[Spread, Spread]:
    """Of a fault that is none of shards all streams are others."""
    found = outcome.by_shard.get(name)
    if found is None:
        return Spread(0), Spread.of(outcome.pauses.get(name, []))
    return Spread.of(found.hit), Spread.of(found.others)


def _affected(pauses: list[float], least_s: float) -> list[float]:
    return [pause for pause in pauses if pause >= least_s]


def _has_aim(fault: Fault, plan: Plan) -> bool:
    """Return whether the target applies; loading a real model takes CPU time from the others."""
    return fault.aim_s is not None and plan.engine == "sim"


def _aim(fault: Fault, outcome: Outcome, least_s: float) -> Target:
    gaps = Spread.of(_affected(outcome.pauses[fault.name], least_s))
    aim_s, what = fault.aim_s or 0.0, f"{fault.what}: p99 of the gaps"
    return _at_most(what, gaps.p99_s, aim_s)


def _aims_of_shards(fault: Fault, outcome: Outcome) -> list[Target]:
    """The targets of a scheduler's end: the gaps of its shards, and those of the others."""
    if not fault.is_of_schedulers:
        return []
    hit, others = _by_shard(fault.name, outcome)
    return [
        _at_most(f"{fault.what}: p99 of the gaps of its shards", hit.p99_s, fault.aim_s or 0.0),
        _at_most(f"{fault.what}: p99 of the others' gaps", others.p99_s, _OTHERS_AIM_S),
    ]


def _at_most(what: str, measured_s: float | None, aim_s: float) -> Target:
    if measured_s is None:
        return Target(what, f"at most {aim_s:g} s", "no streams", True)
    return Target(what, f"at most {aim_s:g} s", f"{measured_s:.2f} s", measured_s <= aim_s)


def _nothing(what: str, count: int) -> Target:
    return Target(what, "0", str(count), count == 0)

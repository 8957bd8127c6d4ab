"""Tokens per second of the runner and of the stack, and the device's idle time, as tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.workload import Work
from benchmarks.gpu.systems import start_runner, start_stack
from benchmarks.gpu.workload import workload
from benchmarks.report import Cell, Column, Part, Target

_BLOCK_SIZES = (16, 256)
_WAYS: Mapping[str, Mapping[str, object]] = {
    "": {},
    ", without graphs": {"enforce_eager": True},
    ", compiled by torch": {"enable_torch_compile": True},
}
# What the stack is to be of its runner's speed, as on a processor.
_OF_RUNNER = 0.93
_MOST_IDLE = 0.05

Row = dict[str, Cell]
Answer = Mapping[str, Any]


def throughput(folder: Path, num_rounds: int = 3) -> Part:
    """The work through the runner alone, in all its ways, and through the stack."""
    work = workload()
    rows: list[Row] = []
    for block_size in _BLOCK_SIZES:
        for way, settings in _WAYS.items():
            with start_runner(folder, block_size, **settings) as host:
                answers = _rounds(host, num_rounds)
            what = f"the runner alone{way}, blocks of {block_size}"
            rows.append(runner_row(what, work, answers))
    with start_stack(folder, _BLOCK_SIZES[0]) as host:
        answers = _rounds(host, num_rounds)
    rows.append(stack_row(f"the stack over gRPC, blocks of {_BLOCK_SIZES[0]}", work, answers))
    return throughput_part(work, rows)


def idle(folder: Path) -> Part:
    """Steps of decoding rows alone: how much of them the device does nothing."""
    with start_runner(folder, _BLOCK_SIZES[0]) as host:
        host.ask("warm")
        found = host.ask("decode")
    return idle_part(found)


def runner_row(what: str, work: Work, answers: Sequence[Answer]) -> Row:
    times = [answer["times"]["decode"] for answer in answers]
    return {
        **_speed(what, work, answers),
        "idle_share": median(_idle_share(sums) for sums in times),
        "decode_ms": median(_total_ns(sums) / sums["steps"] / 1e6 for sums in times),
    }


def stack_row(what: str, work: Work, answers: Sequence[Answer]) -> Row:
    shares = [answer["idle_s"] / (answer["idle_s"] + answer["busy_s"]) for answer in answers]
    return {**_speed(what, work, answers), "idle_share": median(shares), "decode_ms": None}


def throughput_part(work: Work, rows: Sequence[Row]) -> Part:
    first, stack = rows[0]["tokens_per_s"], rows[-1]["tokens_per_s"]
    assert isinstance(first, float)
    assert isinstance(stack, float)
    return Part(
        name="throughput",
        title="The worker, and the stack beside it",
        notes=[
            f"Random bfloat16 weights in the shape of Qwen3-0.6B; {len(work.prompts)} prompts with "
            f"{sum(map(len, work.prompts)):,} tokens, {work.num_output_tokens:,} tokens of output, "
            "all at once, at temperature 0.6: the work of nano-vllm's benchmark. Medians of "
            "rounds.",
            "*Idle*: the share of time between the end of a step on the device and the beginning "
            "of the next one; of the runner's decoding steps, and of all of the stack's.",
        ],
        columns=[
            Column("what", "system"),
            Column("tokens_per_s", "output tokens/s", ",.0f"),
            Column("seconds", "seconds", ".2f"),
            Column("decode_ms", "ms of a decoding step", ".2f"),
            Column("idle_share", "idle", ".2%"),
        ],
        rows=rows,
        targets=[
            Target(
                "the stack, of its runner's speed",
                f"at least {_OF_RUNNER}",
                f"{stack / first:.2f}",
                stack / first >= _OF_RUNNER,
            )
        ],
    )


def idle_part(found: Sequence[Mapping[str, float | None]]) -> Part:
    rows: list[Row] = [{**one, "idle_share": _step_idle_share(one)} for one in found]
    most = rows[-1]["idle_share"]
    assert isinstance(most, float)
    return Part(
        name="idle",
        title="Steps of decoding rows",
        notes=[
            "Rows with prompts of 1,024 tokens that only decode, step behind step. *Between*: from "
            "the end of a step on the device to the forward pass of the next one, the copy of its "
            "inputs included. *Busy*: the time of all kernels and copies of a step by the device's "
            "own records, taken in other steps, as taking them costs time. *Idle*: what of a step "
            "is not busy; where there are no records, what is between."
        ],
        columns=[
            Column("num_rows", "rows", ",.0f"),
            Column("step_ms", "ms of a step", ".3f"),
            Column("between_ms", "between", ".3f"),
            Column("busy_ms", "busy", ".3f"),
            Column("idle_share", "idle", ".2%"),
        ],
        rows=rows,
        targets=[
            Target(
                f"idle, {rows[-1]['num_rows']} rows",
                f"at most {_MOST_IDLE:.0%}",
                f"{most:.2%}",
                most <= _MOST_IDLE,
            )
        ],
    )


def _step_idle_share(found: Mapping[str, float | None]) -> float:
    step_ms, between_ms, busy_ms = (found[name] for name in ("step_ms", "between_ms", "busy_ms"))
    assert step_ms is not None
    assert between_ms is not None
    idle_ms = between_ms if busy_ms is None else step_ms - busy_ms
    return max(0.0, idle_ms / step_ms)


def _rounds(host: Any, num_rounds: int) -> list[Answer]:
    host.ask("warm")
    return [host.ask("run") for _ in range(num_rounds)]


def _speed(what: str, work: Work, answers: Sequence[Answer]) -> Row:
    seconds = median(float(answer["seconds"]) for answer in answers)
    return {
        "what": what,
        "seconds": seconds,
        "tokens_per_s": work.num_output_tokens / seconds,
    }


def _total_ns(sums: Mapping[str, int]) -> int:
    return sum(value for name, value in sums.items() if name.endswith("_ns"))


def _idle_share(sums: Mapping[str, int]) -> float:
    return sums["waiting_ns"] / _total_ns(sums)

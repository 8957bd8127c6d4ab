"""Tables: tokens per second of the runner and of the stack, and the device's idle time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.host import EngineError, Host
from benchmarks.engines.workload import Work
from benchmarks.gpu.systems import start_runner, start_stack
from benchmarks.gpu.workload import workload
from benchmarks.report import Cell, Column, Part, Target

_BLOCK_SIZES = (16, 256)
# Least share of the runner's speed for the stack, as on a CPU.
_OF_RUNNER = 0.93
_MOST_IDLE = 0.05
_KINDS = (_RUNNER, _STACK) = ("runner", "stack")

Row = dict[str, Cell]
Result = Mapping[str, Any]


@dataclass(frozen=True)
class System:
    """A system that runs the work."""

    name: str
    start: Callable[[Path], Host]
    num_rounds: int = 3
    has_graphs: bool = True
    kind: str = ""  # one of _KINDS if it is compared

    def row(self, folder: Path, work: Work) -> Row:
        """Measure the system. EngineError if it does not start, or ends."""
        with self.start(folder) as host:
            host.call("warm")
            results = [host.call("run") for _ in range(self.num_rounds)]
        if self.kind == _STACK:
            return {**stack_row(self.name, work, results), "kind": self.kind}
        row = runner_row(self.name, work, results, has_graphs=self.has_graphs)
        return {**row, "kind": self.kind}


def systems() -> Iterator[System]:
    """Yield the runner alone with all block sizes and modes, and the stack. Systems with targets
    come first, the slowest last."""
    small, large = _BLOCK_SIZES

    def runner(block_size: int, **settings: object) -> Callable[[Path], Host]:
        return lambda folder: start_runner(folder, block_size, **settings)

    def name(block_size: int, way: str = "") -> str:
        return f"the runner alone{way}, blocks of {block_size}"

    yield System(name(small), runner(small), kind=_RUNNER)
    yield System(
        f"the stack over gRPC, blocks of {small}",
        lambda folder: start_stack(folder, small),
        kind=_STACK,
    )
    yield System(name(large), runner(large))
    for size in _BLOCK_SIZES:
        compiled = runner(size, enable_torch_compile=True)
        yield System(name(size, ", compiled by torch"), compiled)
    for size in _BLOCK_SIZES:
        eager = runner(size, enforce_eager=True)
        yield System(name(size, ", without graphs"), eager, num_rounds=1, has_graphs=False)


def throughput(folder: Path) -> Iterator[Part]:
    """Run the work on all systems and yield the table after each. A system that fails is noted in
    the part; RuntimeError at the end if there was one."""
    work = workload()
    rows: list[Row] = []
    failed: list[str] = []
    for system in systems():
        try:
            rows.append(system.row(folder, work))
        except EngineError as error:
            print(error, flush=True)
            failed.append(f"Not measured: {system.name}, as it failed.")
        if rows:
            yield throughput_part(work, tuple(rows), tuple(failed))
    if failed:
        raise RuntimeError(" ".join(failed))


def idle(folder: Path) -> Iterator[Part]:
    """Measure the device's idle time in decode-only steps."""
    with start_runner(folder, _BLOCK_SIZES[0]) as host:
        host.call("warm")
        found = host.call("decode")
    yield idle_part(found)


def runner_row(what: str, work: Work, results: Sequence[Result], *, has_graphs: bool = True) -> Row:
    """Build the runner's row. Without graphs the device also idles between the kernels of a step,
    which the times do not show, so there is no `between_share`."""
    times = [result["times"]["decode"] for result in results]
    return {
        **_speed(what, work, results),
        "attention": results[0]["attention"],
        "between_share": median(map(_between_share, times)) if has_graphs else None,
        "decode_ms": median(_total_ns(sums) / sums["steps"] / 1e6 for sums in times),
    }


def stack_row(what: str, work: Work, results: Sequence[Result]) -> Row:
    return _speed(what, work, results)


def throughput_part(work: Work, rows: Sequence[Row], failed: Sequence[str] = ()) -> Part:
    """Build the table. `failed` are notes on the missing systems."""
    return Part(
        name="throughput",
        title="Throughput of the runner and of the stack",
        notes=[
            f"Qwen3-0.6B with random bfloat16 weights; {len(work.prompts)} prompts with "
            f"{sum(map(len, work.prompts)):,} tokens, {work.num_output_tokens:,} output tokens, "
            "all at once, at temperature 0.6: the work of nano-vllm's benchmark. Medians of "
            "rounds.",
            "*Between*: the share of the runner's decode steps from the end of a step on the "
            "device to the forward pass of the next, including the copy of its inputs.",
            *failed,
        ],
        columns=[
            Column("what", "system"),
            Column("attention", "attention"),
            Column("tokens_per_s", "output tokens/s", ",.0f"),
            Column("seconds", "seconds", ".2f"),
            Column("decode_ms", "ms per decode step", ".2f"),
            Column("between_share", "between", ".2%"),
        ],
        rows=rows,
        targets=list(_stack_targets(rows)),
    )


def _stack_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Yield the target against the runner with the same settings, if both were measured."""
    speeds = {row.get("kind"): row["tokens_per_s"] for row in rows}
    if not speeds.keys() >= set(_KINDS):
        return
    runner, stack = (speeds[kind] for kind in _KINDS)
    assert isinstance(runner, float)
    assert isinstance(stack, float)
    share = stack / runner
    what = "speed of the stack over that of its runner"
    yield Target(what, f"at least {_OF_RUNNER}", f"{share:.2f}", share >= _OF_RUNNER)


def idle_part(found: Sequence[Mapping[str, float | None]]) -> Part:
    rows: list[Row] = [{**one, "idle_share": _step_idle_share(one)} for one in found]
    most = rows[-1]["idle_share"]
    assert isinstance(most, float)
    return Part(
        name="idle",
        title="Decode steps",
        notes=[
            "Rows with prompts of 1,024 tokens that only decode. *Between*: from the end of a step "
            "on the device to the forward pass of the next, including the copy of its inputs. "
            "*Busy*: the time of all kernels and copies of a step by the device's own records, "
            "taken in separate steps because recording costs time. *Idle*: the share of a step "
            "that is not busy; without records, the share between steps. *Launched*: kernels and "
            "copies of a step."
        ],
        columns=[
            Column("num_rows", "rows", ",.0f"),
            Column("step_ms", "ms per step", ".3f"),
            Column("between_ms", "between", ".3f"),
            Column("busy_ms", "busy", ".3f"),
            Column("idle_share", "idle", ".2%"),
            Column("num_records", "launched", ",.0f"),
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


def _speed(what: str, work: Work, results: Sequence[Result]) -> Row:
    seconds = median(float(result["seconds"]) for result in results)
    return {
        "what": what,
        "seconds": seconds,
        "tokens_per_s": work.num_output_tokens / seconds,
    }


def _total_ns(sums: Mapping[str, int]) -> int:
    return sum(value for name, value in sums.items() if name.endswith("_ns"))


def _between_share(sums: Mapping[str, int]) -> float:
    return (sums["waiting_ns"] + sums["preparing_ns"]) / _total_ns(sums)

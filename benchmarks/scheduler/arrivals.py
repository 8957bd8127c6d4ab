"""A steady arrival of requests: Redis calls by kind of step, and the cost of admissions."""

from benchmarks.report import Cell, Column, Part, Target
from benchmarks.scheduler.measure import Window, measured
from benchmarks.scheduler.stack import BenchStack, Setting
from benchmarks.scheduler.throughput import BLOCK_SIZE, Effort
from benchmarks.scheduler.workload import Workload

_STEP_MS = 10.0
_ROWS = 256
# More than the rows: some requests always wait, so that a free row is reused at once.
_CONCURRENCY = 288
_PROMPT_TOKENS = (32, 96)
_OUTPUT_TOKENS = (128, 384)
_MAX_MODEL_LEN = 512
_FILL_TIMEOUT_S = 60.0


def arrivals(effort: Effort) -> Part:
    setting = Setting(
        model={
            "max_model_len": _MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "num_blocks": _ROWS * _MAX_MODEL_LEN // BLOCK_SIZE,
            "max_num_seqs": _ROWS,
            "step_ms": _STEP_MS,
        },
        scheduler={"max-num-seqs": _ROWS},
    )
    with BenchStack(setting) as stack:
        stack.run(
            Workload(
                num_requests=1_000_000,
                concurrency=_CONCURRENCY,
                prompt_tokens=_PROMPT_TOKENS,
                output_tokens=_OUTPUT_TOKENS,
            )
        )
        # The first requests arrived together; from here on requests end at different times.
        stack.wait_for("ended", _CONCURRENCY, _FILL_TIMEOUT_S)
        return _part(measured(stack, effort.num_windows, effort.window_s))


def _part(window: Window) -> Part:
    of_ideal = window.tokens_per_s / (_ROWS * 1000 / _STEP_MS)
    row: dict[str, Cell] = {"of_ideal": of_ideal, **window.figures()}
    return Part(
        name="arrivals",
        title="Arrivals, and Redis calls by kind of step",
        notes=[
            f"One worker with {_ROWS} rows at {_STEP_MS:g} ms; {_CONCURRENCY} concurrent requests, "
            f"prompts of {_PROMPT_TOKENS[0]} to {_PROMPT_TOKENS[1]} tokens, outputs of "
            f"{_OUTPUT_TOKENS[0]} to {_OUTPUT_TOKENS[1]}: about once per step a request ends and "
            "another starts. *All calls* are those of the whole process, including request "
            "records, their compaction every 64 steps, and the lease.",
        ],
        columns=[
            Column("decoding_calls", "calls, decode-only step", ".3f"),
            Column("admitting_calls", "calls, step that admits", ".3f"),
            Column("admitting_share", "steps that admit", ".0%"),
            Column("all_redis_calls", "all calls", ".2f"),
            Column("redis_p50_ms", "wait p50 ms", ".2f"),
            Column("redis_server_ms", "server ms", ".2f"),
            Column("cpu_ms", "CPU ms", ".2f"),
            Column("cpu_p50_ms", "p50", ".2f"),
            Column("cpu_p99_ms", "p99", ".2f"),
            Column("of_ideal", "of ideal", ".3f"),
        ],
        rows=[row],
        targets=[
            _target("decode-only step", window.decoding_calls, 1),
            _target("step that admits", window.admitting_calls, 2),
        ],
    )


def _target(what: str, calls: float | None, most: int) -> Target:
    """Calls are rounded: a prefix match for a request that is not admitted counts for the preceding
    step."""
    met = calls is not None and round(calls, 1) <= most
    shown = "none seen" if calls is None else f"{calls:.3f}"
    return Target(f"Redis calls, {what}", f"{most}", shown, met)

"""Requests that arrive all at once and run together: CPU time per step and per request."""

import time
from collections.abc import Mapping
from statistics import median

from benchmarks.report import Cell, Column, Part
from benchmarks.scheduler.proc import cpu_s
from benchmarks.scheduler.stack import BenchStack, Setting
from benchmarks.scheduler.throughput import BLOCK_SIZE
from benchmarks.scheduler.workload import Workload

_REQUESTS = 64
_PROMPT_TOKENS = (32, 128)
_OUTPUT_TOKENS = 100
_STEP_MS = 50.0
_MAX_MODEL_LEN = 512
_TIMEOUT_S = 60.0
# The end of a request is delivered before its record is written.
_RECORDS_S = 1.0


def burst(num_bursts: int) -> Part:
    setting = Setting(
        model={
            "max_model_len": _MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "num_blocks": _REQUESTS * _MAX_MODEL_LEN // BLOCK_SIZE + 1,
            "max_num_seqs": _REQUESTS,
            "step_ms": _STEP_MS,
        },
        scheduler={"max-num-seqs": _REQUESTS},
    )
    with BenchStack(setting) as stack:
        # The first burst is a warm-up.
        bursts = [_burst(stack, index) for index in range(num_bursts + 1)][1:]
        stack.check()
    return _part({key: median([float(one[key]) for one in bursts]) for key in bursts[0]})


def _burst(stack: BenchStack, index: int) -> dict[str, float]:
    stack.probe.call("collect")
    before = _processor_s(stack)
    stack.run(
        Workload(
            num_requests=_REQUESTS,
            concurrency=_REQUESTS,
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=(_OUTPUT_TOKENS, _OUTPUT_TOKENS),
            seed=index,
        )
    )
    stack.wait_for("ended", (index + 1) * _REQUESTS, _TIMEOUT_S)
    time.sleep(_RECORDS_S)
    spent = {name: now - before[name] for name, now in _processor_s(stack).items()}
    num_steps = len(stack.probe.call("collect")["scheduling_s"])
    return {
        "steps": num_steps,
        "scheduler_step_ms": 1000 * spent["scheduler"] / num_steps,
        "scheduler_request_ms": 1000 * spent["scheduler"] / _REQUESTS,
        "redis_step_ms": 1000 * spent["redis"] / num_steps,
        "redis_request_ms": 1000 * spent["redis"] / _REQUESTS,
    }


def _processor_s(stack: BenchStack) -> dict[str, float]:
    [scheduler] = stack.pids["scheduler"]
    server = stack.redis.info("cpu")
    return {
        "scheduler": cpu_s(scheduler),
        "redis": server["used_cpu_user"] + server["used_cpu_sys"],
    }


def _part(row: Mapping[str, Cell]) -> Part:
    return Part(
        name="burst",
        title=f"{_REQUESTS} requests at once",
        notes=[
            f"One worker, {_STEP_MS:g} ms per step; prompts of {_PROMPT_TOKENS[0]} to "
            f"{_PROMPT_TOKENS[1]} tokens, outputs of {_OUTPUT_TOKENS}. CPU time from the first "
            "submission to one second after the last end, per step and per request. Between such "
            "long steps, other processes displace the CPU caches.",
        ],
        columns=[
            Column("steps", "steps", ".0f"),
            Column("scheduler_step_ms", "scheduler ms per step", ".2f"),
            Column("scheduler_request_ms", "per request", ".2f"),
            Column("redis_step_ms", "Redis ms per step", ".2f"),
            Column("redis_request_ms", "per request", ".2f"),
        ],
        rows=[row],
        targets=[],
    )

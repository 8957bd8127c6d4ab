"""Unit costs: processor time, Redis calls and bytes of a step, of a request and of a token."""

import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.report import Cell, Column, Part
from benchmarks.scheduler.fleet import Counters, Fleet, FleetSetting
from benchmarks.scheduler.gateway_costs import gateway_costs
from benchmarks.scheduler.shards import Window, filled, per_step, windows
from benchmarks.scheduler.throughput import Effort, full_rows
from benchmarks.scheduler.workload import Workload

NUM_ROWS = 256
STEP = f"a step of {NUM_ROWS} rows"
FRAME = "a frame to one more gateway"
NUM_STATE_SHARDS = 32
STATE = f"a state of {NUM_STATE_SHARDS} shards, to a gateway"
REQUEST_OF_SHARD = "a request, at scheduler and Redis"
_NUM_WORKERS = 4
_NUM_GATEWAYS = 8
_STEP_MS = 40.0
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1024
PROMPT_TOKENS = 512
_PROMPT_TOKENS = (PROMPT_TOKENS - 128, PROMPT_TOKENS + 128)
_OUTPUT_TOKENS = (64, 192)
_WAITING = 16
_FILL_TIMEOUT_S = 90.0
_PAUSE_S = 3.0


def units(effort: Effort) -> Part:
    step = {"what": STEP, **_step(effort, 1)}
    frame = {"what": FRAME, **_frame(step, _step(effort, _NUM_GATEWAYS))}
    rows = [step, frame, _state(effort, frame), _request(effort, step), *gateway_costs()]
    return Part(
        name="units",
        title="Unit costs",
        notes=[
            f"*{STEP.capitalize()}*: {_NUM_WORKERS} workers in one shard, {_STEP_MS:g} ms per "
            "step, every row decodes, for one gateway. *A frame*: what a step costs more if its "
            f"rows are those of {_NUM_GATEWAYS} gateways, per frame. *A state*: the numbers of "
            "live requests that each leader reports to each gateway while they change, beyond the "
            "frames that contain them. *A request*: what steps cost more if requests of "
            f"{_PROMPT_TOKENS[0]} to {_PROMPT_TOKENS[1]} tokens and {_OUTPUT_TOKENS[0]} to "
            f"{_OUTPUT_TOKENS[1]} of output start and end in them, per request; its bytes in Redis "
            "are those of its finished record. The gateway's figures are those of requests of "
            "token ids over gRPC: of 128 and 16 tokens of output, sent all at once. *Traffic* is "
            "that of both directions, without headers. A worker's time includes that of the "
            "simulation, about 0.35 ms per step.",
        ],
        columns=[
            Column("what", "what"),
            Column("gateway_ms", "gateway ms", ".3f"),
            Column("scheduler_ms", "scheduler ms", ".2f"),
            Column("redis_ms", "Redis ms", ".2f"),
            Column("workers_ms", "worker ms", ".2f"),
            Column("redis_calls", "Redis calls", ".2f"),
            Column("redis_bytes", "Redis traffic, bytes", ",.0f"),
            Column("worker_bytes", "worker traffic, bytes", ",.0f"),
            Column("frame_bytes", "gateway traffic, bytes", ",.0f"),
            Column("stored_bytes", "bytes in Redis", ",.0f"),
            Column("stored_keys", "keys", ".2f"),
            Column("per_s", "per second", ".2f"),
        ],
        rows=rows,
        targets=[],
    )


def _step(effort: Effort, num_gateways: int) -> dict[str, Cell]:
    effort = effort.of_steps(_STEP_MS)
    model = dict(full_rows(_NUM_WORKERS, NUM_ROWS, _STEP_MS, effort).model)
    setting = FleetSetting(
        num_workers=_NUM_WORKERS,
        num_gateways=num_gateways,
        model=model,
        scheduler={"max-num-seqs": NUM_ROWS},
    )
    with Fleet(setting) as fleet:
        filled(fleet, int(model["max_model_len"]) - 48)
        return per_step(windows(fleet, effort), _NUM_WORKERS)


def _frame(one: dict[str, Cell], several: dict[str, Cell]) -> dict[str, Cell]:
    """What a frame to one more gateway costs."""
    keys = ("scheduler_ms", "frame_bytes")
    more = {key: float(several[key] or 0) - float(one[key] or 0) for key in ("frames", *keys)}
    return {key: more[key] / more["frames"] for key in keys}


def _state(effort: Effort, frame: dict[str, Cell]) -> dict[str, Cell]:
    """States are sent while numbers change: short requests start and end."""
    one, several = (_states(effort, num_gateways) for num_gateways in (1, _NUM_GATEWAYS))
    more = several - one
    frames_s = more.num_frames * float(frame["scheduler_ms"] or 0) / 1000
    used_s = max(0.0, more.scheduler_s - frames_s)
    return {
        "what": STATE,
        "scheduler_ms": 1000 * used_s / more.num_states,
        "frame_bytes": several.state_bytes / several.num_states,
        "per_s": several.num_states / several.at_s / _NUM_GATEWAYS / NUM_STATE_SHARDS,
    }


def _states(effort: Effort, num_gateways: int) -> Counters:
    setting = FleetSetting(
        num_workers=NUM_STATE_SHARDS,
        num_shards=NUM_STATE_SHARDS,
        num_gateways=num_gateways,
        model={"max_model_len": 256, "num_blocks": 512, "max_num_seqs": 8, "step_ms": 100.0},
        scheduler={"max-num-seqs": 8},
    )
    with Fleet(setting) as fleet:
        fleet.run(
            Workload(
                num_requests=1_000_000,
                concurrency=2 * NUM_STATE_SHARDS,
                prompt_tokens=(17, 48),
                output_tokens=(8, 24),
            ),
            [1] * NUM_STATE_SHARDS,
        )
        time.sleep(_PAUSE_S)
        [window] = windows(fleet, replace(effort, num_windows=1))
    return window.used


def _request(effort: Effort, step: dict[str, Cell]) -> dict[str, Cell]:
    effort = replace(effort.of_steps(_STEP_MS), num_windows=1)
    setting = FleetSetting(
        num_workers=_NUM_WORKERS,
        model={
            "max_model_len": _MAX_MODEL_LEN,
            "block_size": _BLOCK_SIZE,
            "num_blocks": NUM_ROWS * _MAX_MODEL_LEN // _BLOCK_SIZE,
            "max_num_seqs": NUM_ROWS,
            "step_ms": _STEP_MS,
        },
        scheduler={"max-num-seqs": NUM_ROWS},
    )
    concurrency = _NUM_WORKERS * NUM_ROWS + _WAITING
    with Fleet(setting) as fleet:
        fleet.run(
            Workload(
                num_requests=1_000_000,
                concurrency=concurrency,
                prompt_tokens=_PROMPT_TOKENS,
                output_tokens=_OUTPUT_TOKENS,
            )
        )
        # The first requests arrived together.
        fleet.wait_for("ended", concurrency, _FILL_TIMEOUT_S)
        before = fleet.sizes()
        found = windows(fleet, effort)
        after = fleet.sizes()
    num_ended = sum(one.used.num_ended for one in found)
    return {
        "what": REQUEST_OF_SHARD,
        **_beyond(found, step),
        "stored_bytes": (after.redis_bytes - before.redis_bytes) / num_ended,
        "stored_keys": (after.redis_keys - before.redis_keys) / num_ended,
    }


def _beyond(found: Sequence[Window], step: dict[str, Cell]) -> dict[str, Cell]:
    """What was used beyond the steps, per request that has ended."""
    [one] = found
    used = per_step(found, _NUM_WORKERS)
    per_request = one.used.num_steps / one.used.num_ended
    keys = ("scheduler_ms", "redis_ms", "redis_calls", "redis_bytes", "worker_bytes")
    return {key: (float(used[key] or 0) - float(step[key] or 0)) * per_request for key in keys}

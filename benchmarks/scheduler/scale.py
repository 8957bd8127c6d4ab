"""Fleets of 10 to 1,000 workers on paper, from the parts `units` and `idle`; and one for real."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields

from benchmarks.report import Cell, Column, Part
from benchmarks.scheduler.fleet import Fleet, FleetSetting
from benchmarks.scheduler.gateway_costs import REQUEST, STREAMED, UNARY
from benchmarks.scheduler.idle import PAIR, PROCESS, SHARD, WORKER, rates, sizes_of
from benchmarks.scheduler.scale_model import (
    Costs,
    IdleCost,
    Load,
    RequestCost,
    StepCost,
    at_rest,
    estimate,
)
from benchmarks.scheduler.units import FRAME, NUM_STATE_SHARDS, REQUEST_OF_SHARD, STATE, STEP

_Rows = Sequence[Mapping[str, Cell]]
_MS = 1e-3
_STEP_MS = (25.0, 10.0)
# Workers, fleets that they are divided into, and shards of each; None: as many as it needs.
_LAYOUTS = (
    (10, 1, None),
    (100, 1, None),
    (100, 5, None),
    (1000, 1, 64),
    (1000, 1, None),
    (1000, 50, None),
)
_KINDS = {"scheduler": PROCESS, "shard": SHARD, "worker": WORKER, "pair": PAIR}
_WORKERS_PER_HOST = 64
_PAUSE_S = 5.0


def scale(units: _Rows, idle: _Rows) -> Part:
    """ValueError without the rows of both parts."""
    costs = costs_of(units, idle)
    return Part(
        name="scale",
        title="Fleets on paper",
        notes=[
            "Estimates from the unit costs and the fleets without requests above: every row of "
            "each worker decodes, 256 rows per worker; outputs have 256 tokens, and are streams "
            "or unary calls. *Cores* are processor seconds per second; a gateway, a scheduler and "
            "a Redis server each use at most one, of which 70 % (Redis: 60 %) count. *Frames* are "
            "the gateways that get tokens of a step. Traffic is that of all processes together. "
            "*Fleets* share nothing, and their figures are sums. A scheduler that has more than 70 "
            "% of a core to do (*of one*) is late, so such a row is no plan: with each scheduler, "
            "the work of all of them grows.",
        ],
        columns=[
            Column("workers", "workers", ",d"),
            Column("fleets", "fleets", "d"),
            Column("step_ms", "step ms", "g"),
            Column("output", "output"),
            Column("tokens_per_s", "tokens/s", ",.0f"),
            Column("gateways", "gateways", ",d"),
            Column("gateway_cores", "cores", ",.1f"),
            Column("shards", "shards", ",d"),
            Column("scheduler_cores", "cores: schedulers", ",.1f"),
            Column("each", "of one", ".2f"),
            Column("redis_servers", "Redis servers", ",d"),
            Column("redis_cores", "cores", ",.1f"),
            Column("frames", "frames per step", ".1f"),
            Column("redis_calls", "Redis calls/s", ",.0f"),
            Column("redis_mb", "Redis MB/s", ",.1f"),
            Column("worker_mb", "workers MB/s", ",.1f"),
            Column("gateway_mb", "gateways MB/s", ",.1f"),
            Column("keys", "keys", ",.0f"),
            Column("stored_gb", "GB in Redis", ",.2f"),
            Column("redis_connections", "connections of Redis", ",.0f"),
            Column("sockets", "sockets of schedulers", ",.0f"),
        ],
        rows=[
            _row(costs, workers, step_ms, streamed, fleets, shards)
            for step_ms in _STEP_MS
            for streamed in (1.0, 0.0)
            for workers, fleets, shards in _LAYOUTS
        ],
        targets=[],
    )


def fleet(
    num_workers: int, num_shards: int, num_schedulers: int, idle: _Rows, window_s: float
) -> Part:
    """Compare a real fleet at rest with the estimate."""
    setting = FleetSetting(
        num_workers=num_workers,
        num_shards=num_shards,
        num_schedulers=num_schedulers,
        model={"max_model_len": 1024, "num_blocks": 4096, "max_num_seqs": 16, "step_ms": 100.0},
        workers_per_host=_WORKERS_PER_HOST,
    )
    with Fleet(setting) as running:
        time.sleep(_PAUSE_S)
        before = running.counters()
        time.sleep(window_s)
        used = running.counters() - before
        measured = {**rates(used), **sizes_of(running.sizes())}
        running.check()
    costs = _idle(idle)
    expected: dict[str, Cell] = {
        name: at_rest(costs, num_workers, num_schedulers, num_shards, name) for name in _IDLE_FIELDS
    }
    return Part(
        name="fleet",
        title=f"{num_workers} workers in {num_shards} shards at rest",
        notes=[
            f"Led by {num_schedulers} schedulers, without requests: as measured, and as estimated "
            "from the smaller fleets above. Per second, and in all.",
        ],
        columns=[Column("what", "what"), *_IDLE_COLUMNS],
        rows=[{"what": "measured", **measured}, {"what": "estimated", **expected}],
        targets=[],
    )


_IDLE_COLUMNS = [
    Column("scheduler_s", "cores: schedulers", ".3f"),
    Column("redis_s", "Redis", ".3f"),
    Column("redis_calls", "Redis calls/s", ",.0f"),
    Column("redis_bytes", "bytes/s", ",.0f"),
    Column("redis_keys", "keys", ",.0f"),
    Column("redis_bytes_stored", "bytes stored", ",.0f"),
    Column("redis_connections", "connections", ",.0f"),
    Column("sockets", "sockets", ",.0f"),
]
_IDLE_FIELDS = [column.key for column in _IDLE_COLUMNS]


def costs_of(units: _Rows, idle: _Rows) -> Costs:
    """The costs in rows of the parts `units` and `idle`. ValueError if one is missing."""
    step, frame, state = (_find(units, what) for what in (STEP, FRAME, STATE))
    request = _find(units, REQUEST_OF_SHARD)
    return Costs(
        step=StepCost(
            scheduler_s=_MS * _number(step, "scheduler_ms"),
            redis_s=_MS * _number(step, "redis_ms"),
            redis_calls=_number(step, "redis_calls"),
            redis_bytes=_number(step, "redis_bytes"),
            worker_bytes=_number(step, "worker_bytes"),
            frame_bytes=_number(step, "frame_bytes"),
        ),
        request=RequestCost(
            gateway_s=_MS * _number(_find(units, REQUEST), "gateway_ms"),
            scheduler_s=_MS * _number(request, "scheduler_ms"),
            redis_s=_MS * _number(request, "redis_ms"),
            redis_bytes=_number(request, "redis_bytes"),
            stored_bytes=_number(request, "stored_bytes"),
            stored_keys=_number(request, "stored_keys"),
        ),
        frame_scheduler_s=_MS * _number(frame, "scheduler_ms"),
        frame_bytes=_number(frame, "frame_bytes"),
        state_scheduler_s=_MS * _number(state, "scheduler_ms") / NUM_STATE_SHARDS,
        state_bytes=_number(state, "frame_bytes") / NUM_STATE_SHARDS,
        states_per_s=_number(state, "per_s"),
        streamed_s=_MS * _number(_find(units, STREAMED), "gateway_ms"),
        unary_s=_MS * _number(_find(units, UNARY), "gateway_ms"),
        idle=_idle(idle),
    )


def _idle(rows: _Rows) -> dict[str, IdleCost]:
    return {kind: _idle_cost(_find(rows, what)) for kind, what in _KINDS.items()}


def _idle_cost(row: Mapping[str, Cell]) -> IdleCost:
    return IdleCost(**{field.name: _number(row, field.name) for field in fields(IdleCost)})


def _find(rows: _Rows, what: str) -> Mapping[str, Cell]:
    for row in rows:
        if row["what"] == what:
            return row
    raise ValueError(f"there is no result of {what}: run the parts units and idle first")


def _number(row: Mapping[str, Cell], key: str) -> float:
    """At least 0: what is small may be measured as less."""
    return max(0.0, float(row.get(key) or 0))


def _row(
    costs: Costs,
    num_workers: int,
    step_ms: float,
    streamed: float,
    num_fleets: int,
    num_shards: int | None,
) -> dict[str, Cell]:
    load = Load(num_workers=num_workers // num_fleets, step_s=_MS * step_ms, streamed=streamed)
    found = estimate(costs, load, num_shards)
    return {
        "workers": num_workers,
        "fleets": num_fleets,
        "step_ms": step_ms,
        "output": "streams" if streamed else "unary",
        "tokens_per_s": num_fleets * load.tokens_per_s,
        "gateways": num_fleets * found.num_gateways,
        "gateway_cores": num_fleets * found.gateway_cores,
        "shards": num_fleets * found.num_shards,
        "scheduler_cores": num_fleets * found.scheduler_cores,
        "each": found.cores_per_scheduler,
        "redis_servers": num_fleets * found.num_redis,
        "redis_cores": num_fleets * found.redis_cores,
        "frames": found.frames_per_step,
        "redis_calls": num_fleets * found.redis_calls_per_s,
        "redis_mb": num_fleets * found.redis_bytes_per_s / 1e6,
        "worker_mb": num_fleets * found.worker_bytes_per_s / 1e6,
        "gateway_mb": num_fleets * found.gateway_bytes_per_s / 1e6,
        "keys": num_fleets * found.redis_keys,
        "stored_gb": num_fleets * found.redis_bytes / 1e9,
        "redis_connections": num_fleets * found.redis_connections,
        "sockets": num_fleets * found.sockets,
    }

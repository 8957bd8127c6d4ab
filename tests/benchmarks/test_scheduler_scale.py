"""Fleets on paper: what is estimated from unit costs, and what fleets at rest add up to."""

import pytest

from benchmarks.report import Cell
from benchmarks.scheduler.idle import PAIR, PROCESS, SHARD, WORKER, fitted
from benchmarks.scheduler.scale_model import (
    Costs,
    IdleCost,
    Load,
    RequestCost,
    StepCost,
    at_rest,
    estimate,
    frames_per_step,
)

_STEP = StepCost(
    scheduler_s=1e-3,
    redis_s=2e-4,
    redis_calls=1.0,
    redis_bytes=5000.0,
    worker_bytes=2000.0,
    frame_bytes=1800.0,
)
_REQUEST = RequestCost(
    gateway_s=1e-3,
    scheduler_s=1e-3,
    redis_s=1e-3,
    redis_bytes=7000.0,
    stored_bytes=5000.0,
    stored_keys=2.0,
)
_IDLE = {
    "scheduler": IdleCost(scheduler_s=0.01, sockets=7.0),
    "shard": IdleCost(redis_keys=3.0),
    "worker": IdleCost(redis_keys=2.0, sockets=1.0),
    "pair": IdleCost(scheduler_s=0.001, redis_connections=1.0),
}


def costs(streamed_s: float = 1e-4, state_scheduler_s: float = 0.0) -> Costs:
    return Costs(
        step=_STEP,
        request=_REQUEST,
        frame_scheduler_s=0.0,
        frame_bytes=10.0,
        state_scheduler_s=state_scheduler_s,
        state_bytes=50.0,
        states_per_s=4.0,
        streamed_s=streamed_s,
        unary_s=1e-6,
        idle=_IDLE,
    )


def row(schedulers: int, shards: int, workers: int) -> dict[str, Cell]:
    """A fleet of which each kind adds a known amount of keys, and a pair a connection."""
    return {
        "num_schedulers": schedulers,
        "num_shards": shards,
        "num_workers": workers,
        "redis_keys": 5 * shards + 2 * workers,
        "redis_connections": 3 * schedulers + schedulers * shards,
    }


def test_what_each_kind_adds_is_found() -> None:
    sizes = [(1, 1, 16), (1, 8, 16), (4, 8, 16), (1, 8, 64), (4, 32, 64)]
    found = {one["what"]: one for one in fitted([row(*size) for size in sizes])}
    keys = [float(found[kind]["redis_keys"] or 0) for kind in (PROCESS, SHARD, WORKER, PAIR)]
    assert keys == pytest.approx([0, 5, 2, 0], abs=1e-6)
    links = [float(found[kind]["redis_connections"] or 0) for kind in (PROCESS, SHARD, PAIR)]
    assert links == pytest.approx([3, 0, 1], abs=1e-6)


def test_nothing_adds_less_than_nothing() -> None:
    rows = [{**row(1, n, 16), "redis_keys": 10 - n} for n in (1, 2, 4)]
    assert all(float(one["redis_keys"] or 0) >= 0 for one in fitted(rows))


def test_a_fleet_at_rest_is_the_sum_of_its_parts() -> None:
    assert at_rest(_IDLE, 100, 4, 8, "redis_keys") == 8 * 3 + 100 * 2
    assert at_rest(_IDLE, 100, 4, 8, "redis_connections") == 4 * 8


def test_frames_are_those_of_gateways_with_rows() -> None:
    assert frames_per_step(1, 256) == 1
    assert frames_per_step(4, 256) == pytest.approx(4)
    assert 200 < frames_per_step(1000, 256) < 256


def test_processes_follow_from_the_work() -> None:
    found = estimate(costs(streamed_s=9e-5), Load(num_workers=100, step_s=0.025))
    # 4,000 steps and requests a second, 1 ms each, and what processes use at rest.
    assert found.scheduler_cores == pytest.approx(8, rel=0.1)
    assert found.num_schedulers == found.num_shards
    assert 11 <= found.num_shards <= 13
    assert found.cores_per_scheduler <= 0.7
    # 1,024,000 tokens a second of 0.09 ms.
    assert found.gateway_cores == pytest.approx(92.16 + 4)
    assert found.num_gateways == 138
    assert found.redis_cores == pytest.approx(4000 * 1.2e-3)
    assert found.num_redis == 8
    # 4,000 records a second for 600 s are more than the shards keep.
    assert found.redis_bytes == found.num_shards * 256 * 2**20


def test_unary_calls_need_fewer_gateways() -> None:
    load = Load(num_workers=100, step_s=0.025, streamed=0.0)
    assert estimate(costs(), load).num_gateways == 8


def test_given_shards_are_kept_even_if_they_are_too_few() -> None:
    found = estimate(costs(), Load(num_workers=1000, step_s=0.025), num_shards=64)
    assert (found.num_shards, found.num_schedulers) == (64, 64)
    assert found.cores_per_scheduler > 0.7


def test_states_that_outgrow_every_process_are_not_hidden() -> None:
    """Each scheduler that is added lists all shards to all gateways."""
    found = estimate(costs(state_scheduler_s=1e-4), Load(num_workers=1000, step_s=0.01))
    assert found.cores_per_scheduler > 0.7

"""A fleet on paper: what each tier uses, from the measured costs of steps, requests, and idling.

Pure. Cores are processor seconds per second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.cluster.cluster_map import MAX_SHARDS

# Above this share of a core a process is late: its work arrives in bursts.
BUSY = 0.7
# One process does all commands of a Redis server.
_REDIS_BUSY = 0.6
# Tokens of a unary call are delivered in groups.
_DEFERRED_TOKENS = 32
# A finished request's record stays for so long, within so many bytes per shard.
FINISHED_TTL_S = 600.0
FINISHED_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """A step of one worker whose rows all belong to one gateway; seconds, calls, bytes."""

    scheduler_s: float
    redis_s: float
    redis_calls: float
    redis_bytes: float
    worker_bytes: float
    frame_bytes: float


@dataclass(frozen=True, kw_only=True)
class RequestCost:
    """What a request adds to its steps."""

    gateway_s: float
    scheduler_s: float
    redis_s: float
    redis_bytes: float
    stored_bytes: float
    stored_keys: float


@dataclass(frozen=True, kw_only=True)
class IdleCost:
    """What a scheduler, a shard, a worker, or a pair of scheduler and shard adds at rest."""

    scheduler_s: float = 0.0
    redis_s: float = 0.0
    redis_calls: float = 0.0
    redis_bytes: float = 0.0
    redis_keys: float = 0.0
    redis_bytes_stored: float = 0.0
    redis_connections: float = 0.0
    sockets: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    step: StepCost
    request: RequestCost
    # A frame to one more gateway.
    frame_scheduler_s: float
    frame_bytes: float
    # A state of the shards to a gateway: per shard that it lists, and states per second.
    state_scheduler_s: float
    state_bytes: float
    states_per_s: float
    # A token at the gateway: of a stream, of a unary call.
    streamed_s: float
    unary_s: float
    # By scheduler, shard, worker, pair.
    idle: Mapping[str, IdleCost]


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work: every row of every worker decodes."""

    num_workers: int
    step_s: float
    rows: int = 256
    output_tokens: int = 256
    # The share of tokens that clients receive as streams.
    streamed: float = 1.0

    @property
    def steps_per_s(self) -> float:
        return self.num_workers / self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.steps_per_s * self.rows

    @property
    def delivered_rows(self) -> float:
        """Rows of a step whose tokens are delivered with it."""
        return self.rows * (self.streamed + (1 - self.streamed) / _DEFERRED_TOKENS)

    @property
    def requests_per_s(self) -> float:
        return self.tokens_per_s / self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a deployment uses."""

    num_gateways: int
    gateway_cores: float
    num_schedulers: int
    num_shards: int
    scheduler_cores: float
    # Redis servers, each with a part of the shards.
    num_redis: int
    redis_cores: float
    # Of a step: the gateways that have rows in it.
    frames_per_step: float
    redis_calls_per_s: float
    redis_bytes_per_s: float
    worker_bytes_per_s: float
    gateway_bytes_per_s: float
    redis_keys: float
    redis_bytes: float
    redis_connections: float
    # Of all schedulers: to workers, gateways, Redis and each other.
    sockets: float

    @property
    def cores_per_scheduler(self) -> float:
        return self.scheduler_cores / self.num_schedulers


def estimate(costs: Costs, load: Load, num_shards: int | None = None) -> Estimate:
    """Estimate a deployment with as many gateways, schedulers and Redis servers as it needs.

    Each scheduler leads one shard; there are `num_shards`, or as many as are needed, and at most as
    many as the service allows. So one scheduler may have more work than it can do.
    """
    gateway_cores = _gateway_cores(costs, load)
    gateways = max(2, math.ceil(gateway_cores / BUSY))
    frames = frames_per_step(gateways, load.delivered_rows)
    schedulers = num_shards or 1
    while True:
        shards = num_shards or schedulers
        # Each shard's leader lists all shards to each gateway.
        listed_per_s = costs.states_per_s * gateways * shards * shards
        cores = _scheduler_cores(costs, load, frames, schedulers, shards)
        cores += listed_per_s * costs.state_scheduler_s
        # More processes add work of their own: their number converges, or is the greatest.
        needed = min(MAX_SHARDS, num_shards or math.ceil(cores / BUSY))
        if needed <= schedulers:
            break
        schedulers = needed
    redis_cores = _redis_cores(costs, load, schedulers, shards)
    stored = min(
        load.requests_per_s * FINISHED_TTL_S * costs.request.stored_bytes,
        float(shards * FINISHED_MAX_BYTES),
    )

    def rest(what: str) -> float:
        return at_rest(costs.idle, load.num_workers, schedulers, shards, what)

    return Estimate(
        num_gateways=gateways,
        gateway_cores=gateway_cores,
        num_schedulers=schedulers,
        num_shards=shards,
        scheduler_cores=cores,
        num_redis=max(1, math.ceil(redis_cores / _REDIS_BUSY)),
        redis_cores=redis_cores,
        frames_per_step=frames,
        redis_calls_per_s=load.steps_per_s * costs.step.redis_calls + rest("redis_calls"),
        redis_bytes_per_s=load.steps_per_s * costs.step.redis_bytes
        + load.requests_per_s * costs.request.redis_bytes
        + rest("redis_bytes"),
        worker_bytes_per_s=load.steps_per_s * costs.step.worker_bytes,
        gateway_bytes_per_s=load.steps_per_s
        * (costs.step.frame_bytes + (frames - 1) * costs.frame_bytes)
        + listed_per_s * costs.state_bytes,
        redis_keys=rest("redis_keys")
        + stored / costs.request.stored_bytes * costs.request.stored_keys,
        redis_bytes=rest("redis_bytes_stored") + stored,
        redis_connections=rest("redis_connections"),
        sockets=rest("sockets") + gateways * shards,
    )


def frames_per_step(num_gateways: int, rows: float) -> float:
    """Expected number of gateways that get a row's tokens, if rows are spread at random."""
    return float(num_gateways * (1 - (1 - 1 / num_gateways) ** rows))


def at_rest(
    idle: Mapping[str, IdleCost], num_workers: int, num_schedulers: int, num_shards: int, what: str
) -> float:
    """One figure of a fleet without requests: a field of IdleCost."""
    counts = {
        "scheduler": num_schedulers,
        "shard": num_shards,
        "worker": num_workers,
        "pair": num_schedulers * num_shards,
    }
    return sum(count * float(getattr(idle[kind], what)) for kind, count in counts.items())


def _gateway_cores(costs: Costs, load: Load) -> float:
    per_token = load.streamed * costs.streamed_s + (1 - load.streamed) * costs.unary_s
    return load.tokens_per_s * per_token + load.requests_per_s * costs.request.gateway_s


def _scheduler_cores(
    costs: Costs, load: Load, frames: float, num_schedulers: int, num_shards: int
) -> float:
    per_step = costs.step.scheduler_s + (frames - 1) * costs.frame_scheduler_s
    return (
        load.steps_per_s * per_step
        + load.requests_per_s * costs.request.scheduler_s
        + at_rest(costs.idle, load.num_workers, num_schedulers, num_shards, "scheduler_s")
    )


def _redis_cores(costs: Costs, load: Load, num_schedulers: int, num_shards: int) -> float:
    return (
        load.steps_per_s * costs.step.redis_s
        + load.requests_per_s * costs.request.redis_s
        + at_rest(costs.idle, load.num_workers, num_schedulers, num_shards, "redis_s")
    )

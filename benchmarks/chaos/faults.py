"""The faults, injected one at a time; some of them are pairs of kills."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.chaos.ranks import kill_loading_rank, kill_rank, pause_rank
from benchmarks.chaos.stack import ChaosStack
from benchmarks.cluster_view import ClusterView
from quire.launcher.child import ChildProcess
from quire.launcher.processes import ServiceProcess

_PAUSE_S = 5.0
# Between the two kills of a pair: the second one hits the recovery from the first.
_APART_S = (0.5, 3.0)


@dataclass(frozen=True)
class Injected:
    """A fault that was injected."""

    target: str
    # The shards that it has hit; None if it is none of shards, as the end of a gateway.
    shards: frozenset[int] | None


# Injects the fault. A paused process is resumed before it returns.
Inject = Callable[[ChaosStack, random.Random], Awaitable[Injected]]
# Chooses two processes, before either is killed.
Choose = Callable[[ChaosStack, random.Random], Awaitable[Sequence[ChildProcess]]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    what: str
    inject: Inject
    # Target for the 99th percentile of the affected streams' gaps; None: no target.
    aim_s: float | None = None
    # Whether it is one of workers of several ranks alone.
    is_of_ranks: bool = False
    # Whether it needs several shards.
    is_of_shards: bool = False
    # Whether it needs a Redis Cluster.
    is_of_redis_cluster: bool = False
    # Whether it is a scheduler's end, which must pause the streams of its shards alone.
    is_of_schedulers: bool = False


def _worker(stack: ChaosStack, rng: random.Random) -> ServiceProcess:
    return rng.choice(stack.local.processes("worker"))


async def _leader(stack: ChaosStack, rng: random.Random) -> ServiceProcess:
    """A scheduler that leads at least one shard."""
    return rng.choice(await stack.leaders())


def _gateway(stack: ChaosStack, rng: random.Random) -> ServiceProcess:
    return rng.choice(stack.local.processes("gateway"))


def _redis(stack: ChaosStack, rng: random.Random) -> ChildProcess:
    return rng.choice(stack.redis.processes)


async def _kill_worker(stack: ChaosStack, rng: random.Random) -> Injected:
    return await _kill(stack, _worker(stack, rng))


async def _kill_leader(stack: ChaosStack, rng: random.Random) -> Injected:
    return await _kill(stack, await _leader(stack, rng))


async def _kill_gateway(stack: ChaosStack, rng: random.Random) -> Injected:
    return await _kill(stack, _gateway(stack, rng))


async def _kill_redis(stack: ChaosStack, rng: random.Random) -> Injected:
    return await _kill(stack, _redis(stack, rng))


async def _pause_worker(stack: ChaosStack, rng: random.Random) -> Injected:
    return await _pause(stack, _worker(stack, rng))


async def _pause_leader(stack: ChaosStack, rng: random.Random) -> Injected:
    return await _pause(stack, await _leader(stack, rng))


async def _empty_redis(stack: ChaosStack, _: random.Random) -> Injected:
    view = await stack.view()
    with stack.redis.client() as client:
        await asyncio.to_thread(client.flushall)
    return Injected("redis", view.every)


async def _replace_primary(stack: ChaosStack, rng: random.Random) -> Injected:
    """Kill the primary with the keys of a shard; its replica takes over."""
    assert stack.cluster is not None
    view = await stack.view()
    shard = rng.choice(sorted(view.every))
    node = await asyncio.to_thread(stack.cluster.primary_of, shard)
    hit = await asyncio.to_thread(stack.cluster.shards_of, node, len(view.shards))
    return Injected(await stack.cluster.replace(shard), hit)


async def _two_workers(stack: ChaosStack, rng: random.Random) -> Sequence[ChildProcess]:
    return rng.sample(stack.local.processes("worker"), 2)


async def _worker_and_leader(stack: ChaosStack, rng: random.Random) -> Sequence[ChildProcess]:
    return [_worker(stack, rng), await _leader(stack, rng)]


async def _two_leaders(stack: ChaosStack, rng: random.Random) -> Sequence[ChildProcess]:
    return rng.sample(await stack.leaders(), 2)


async def _gateway_and_redis(stack: ChaosStack, rng: random.Random) -> Sequence[ChildProcess]:
    return [_gateway(stack, rng), _redis(stack, rng)]


async def _two_parts(stack: ChaosStack, rng: random.Random) -> Sequence[ChildProcess]:
    """Two of a worker, a leader, a gateway and Redis, in random order."""
    parts = [_worker(stack, rng), await _leader(stack, rng), _gateway(stack, rng)]
    return rng.sample([*parts, _redis(stack, rng)], 2)


def _kill_pair(choose: Choose, is_apart: bool) -> Inject:
    """Kill what is chosen, at once or apart."""

    async def inject(stack: ChaosStack, rng: random.Random) -> Injected:
        first, second = await choose(stack, rng)
        return await _kill_both(stack, first, second, rng.uniform(*_APART_S) if is_apart else 0.0)

    return inject


def _kill_in_any_order(choose: Choose) -> Inject:
    """Kill what is chosen in random order, half of the pairs at once and half of them apart."""

    async def inject(stack: ChaosStack, rng: random.Random) -> Injected:
        first, second = rng.sample(await choose(stack, rng), 2)
        apart_s = rng.choice([0.0, rng.uniform(*_APART_S)])
        return await _kill_both(stack, first, second, apart_s)

    return inject


def _of_ranks(inject: Callable[[ChaosStack, random.Random], Awaitable[str]]) -> Inject:
    async def injected(stack: ChaosStack, rng: random.Random) -> Injected:
        return Injected(await inject(stack, rng), None)

    return injected


async def _kill_both(
    stack: ChaosStack, first: ChildProcess, second: ChildProcess, apart_s: float
) -> Injected:
    views = [await stack.view()]
    one = _end(stack, first)
    if apart_s:
        await asyncio.sleep(apart_s)
        # The second one may have taken shards of the first one.
        views += filter(None, [await asyncio.to_thread(stack.find_view)])
    other = _end(stack, second)
    hit = [shards_of(child, view) for child in (first, second) for view in views]
    known = [shards for shards in hit if shards is not None]
    return Injected(
        f"{one}, {apart_s:.1f} s later {other}", frozenset().union(*known) if known else None
    )


async def _kill(stack: ChaosStack, child: ChildProcess) -> Injected:
    hit = shards_of(child, await stack.view())
    return Injected(_end(stack, child), hit)


def _end(stack: ChaosStack, child: ChildProcess) -> str:
    target = f"{child.name} (pid {child.pid})"
    stack.expect_end(child)
    child.kill()
    return target


async def _pause(stack: ChaosStack, child: ChildProcess) -> Injected:
    hit = shards_of(child, await stack.view())
    child.pause()
    try:
        await asyncio.sleep(_PAUSE_S)
    finally:
        child.resume()
    return Injected(f"{child.name} (pid {child.pid})", hit)


def shards_of(child: ChildProcess, view: ClusterView) -> frozenset[int] | None:
    """The shards that a process serves; None for a gateway. A Redis server counts for all."""
    if not isinstance(child, ServiceProcess):
        return view.every
    if child.name.startswith("gateway"):
        return None
    is_worker = child.name.startswith("worker")
    return view.with_worker(child.address) if is_worker else view.led_by(child.address)


FAULTS = (
    Fault("worker-killed", "`kill -9` of a worker", _kill_worker, aim_s=1.0),
    Fault("worker-stopped", "`SIGSTOP` of a worker for 5 s", _pause_worker, aim_s=5.0),
    Fault(
        "leader-killed",
        "`kill -9` of a leading scheduler",
        _kill_leader,
        aim_s=0.7,
        is_of_schedulers=True,
    ),
    Fault(
        "leader-stopped",
        "`SIGSTOP` of a leading scheduler for 5 s",
        _pause_leader,
        is_of_schedulers=True,
    ),
    Fault("gateway-killed", "`kill -9` of a gateway", _kill_gateway, aim_s=1.0),
    Fault("redis-killed", "`kill -9` of Redis, which keeps its file", _kill_redis),
    Fault("redis-emptied", "`FLUSHALL`", _empty_redis),
    Fault("workers-killed", "`kill -9` of two workers", _kill_pair(_two_workers, False)),
    Fault(
        "workers-killed-apart",
        "`kill -9` of two workers, 0.5 to 3 s apart",
        _kill_pair(_two_workers, True),
    ),
    Fault(
        "pair-killed",
        "`kill -9` of two of worker, leader, gateway and Redis",
        _kill_pair(_two_parts, False),
    ),
    Fault(
        "pair-killed-apart",
        "`kill -9` of two of worker, leader, gateway and Redis, 0.5 to 3 s apart",
        _kill_pair(_two_parts, True),
    ),
    Fault(
        "worker-leader-killed",
        "`kill -9` of a worker and a leading scheduler",
        _kill_in_any_order(_worker_and_leader),
    ),
    Fault(
        "leaders-killed",
        "`kill -9` of two leading schedulers",
        _kill_in_any_order(_two_leaders),
        aim_s=0.7,
        is_of_shards=True,
        is_of_schedulers=True,
    ),
    Fault(
        "gateway-redis-killed",
        "`kill -9` of a gateway and Redis",
        _kill_in_any_order(_gateway_and_redis),
    ),
    Fault(
        "redis-primary-killed",
        "`kill -9` of a primary of the Redis Cluster",
        _replace_primary,
        is_of_redis_cluster=True,
    ),
    Fault("rank-killed", "`kill -9` of a rank", _of_ranks(kill_rank), aim_s=1.0, is_of_ranks=True),
    Fault(
        "rank-stopped",
        "`SIGSTOP` of a rank for 5 s",
        _of_ranks(pause_rank),
        aim_s=5.0,
        is_of_ranks=True,
    ),
    Fault(
        "rank-killed-loading",
        "`kill -9` of a worker, and of a rank of its successor up to 8 s after its start",
        _of_ranks(kill_loading_rank),
        is_of_ranks=True,
    ),
)

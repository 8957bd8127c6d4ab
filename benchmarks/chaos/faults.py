"""The faults, injected one at a time; some of them are pairs of kills."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import redis

from benchmarks.chaos.ranks import kill_loading_rank, kill_rank, pause_rank
from benchmarks.chaos.stack import ChaosStack
from quire.launcher.child import ChildProcess

_PAUSE_S = 5.0
# Between the two kills of a pair: the second one hits the recovery from the first.
_APART_S = (0.5, 3.0)
# Injects the fault and returns its target. A paused process is resumed before it returns.
Inject = Callable[[ChaosStack, random.Random], Awaitable[str]]
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


async def _kill_worker(stack: ChaosStack, rng: random.Random) -> str:
    return await _kill(stack, rng.choice(stack.local.processes("worker")))


async def _kill_leader(stack: ChaosStack, _: random.Random) -> str:
    return await _kill(stack, await stack.leader())


async def _kill_gateway(stack: ChaosStack, rng: random.Random) -> str:
    return await _kill(stack, rng.choice(stack.local.processes("gateway")))


async def _kill_redis(stack: ChaosStack, _: random.Random) -> str:
    return await _kill(stack, stack.local.redis)


async def _pause_worker(stack: ChaosStack, rng: random.Random) -> str:
    return await _pause(rng.choice(stack.local.processes("worker")))


async def _pause_leader(stack: ChaosStack, _: random.Random) -> str:
    return await _pause(await stack.leader())


async def _empty_redis(stack: ChaosStack, _: random.Random) -> str:
    with redis.Redis.from_url(stack.local.redis.url) as client:
        await asyncio.to_thread(client.flushall)
    return "redis"


async def _two_workers(stack: ChaosStack, rng: random.Random) -> Sequence[ChildProcess]:
    return rng.sample(stack.local.processes("worker"), 2)


async def _two_parts(stack: ChaosStack, rng: random.Random) -> Sequence[ChildProcess]:
    """Two of a worker, the leader, a gateway and Redis, in random order."""
    local = stack.local
    parts: list[ChildProcess] = [
        rng.choice(local.processes("worker")),
        await stack.leader(),
        rng.choice(local.processes("gateway")),
        local.redis,
    ]
    return rng.sample(parts, 2)


def _kill_pair(choose: Choose, is_apart: bool) -> Inject:
    """Kill what is chosen, at once or apart."""

    async def inject(stack: ChaosStack, rng: random.Random) -> str:
        first, second = await choose(stack, rng)
        killed = await _kill(stack, first)
        apart_s = rng.uniform(*_APART_S) if is_apart else 0.0
        await asyncio.sleep(apart_s)
        return f"{killed}, {apart_s:.1f} s later {await _kill(stack, second)}"

    return inject


async def _kill(stack: ChaosStack, child: ChildProcess) -> str:
    target = f"{child.name} (pid {child.pid})"
    stack.expect_end(child)
    child.kill()
    return target


async def _pause(child: ChildProcess) -> str:
    child.pause()
    try:
        await asyncio.sleep(_PAUSE_S)
    finally:
        child.resume()
    return f"{child.name} (pid {child.pid})"


FAULTS = (
    Fault("worker-killed", "`kill -9` of a worker", _kill_worker, aim_s=1.0),
    Fault("worker-stopped", "`SIGSTOP` of a worker for 5 s", _pause_worker, aim_s=5.0),
    Fault("leader-killed", "`kill -9` of the leading scheduler", _kill_leader, aim_s=1.0),
    Fault("leader-stopped", "`SIGSTOP` of the leading scheduler for 5 s", _pause_leader),
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
    Fault("rank-killed", "`kill -9` of a rank", kill_rank, aim_s=1.0, is_of_ranks=True),
    Fault("rank-stopped", "`SIGSTOP` of a rank for 5 s", pause_rank, aim_s=5.0, is_of_ranks=True),
    Fault(
        "rank-killed-loading",
        "`kill -9` of a worker, and of a rank of its successor up to 8 s after its start",
        kill_loading_rank,
        is_of_ranks=True,
    ),
)

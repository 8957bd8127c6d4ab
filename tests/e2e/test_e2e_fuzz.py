"""8,000 random calls: no status without a meaning, and no process keeps their memory."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import redis
from grpc_fuzz import Fuzzer, Generator

from quire import AsyncClient, SamplingParams
from quire.launcher.redis import EmbeddedRedis
from quire.launcher.stack import LocalStack

MODEL = "demo/model"
SEED = 1
NUM_CALLS = 8000
NUM_FIRST_CALLS = 1000
NUM_AT_ONCE = 48
MEMORY_S = 60.0
# Above the largest resume window, for which a request may outlive its client, and the time to live.
RECORDS_S = 90.0
MEMORY_GROWTH = 1.2
MAX_PEAK_BYTES = 2**30
NUM_BLOCKS = 2049
SETTINGS = {
    "QUIRE_WORKER_NUM_BLOCKS": str(NUM_BLOCKS),
    "QUIRE_WORKER_ENGINE": "sim",
    "QUIRE_WORKER_SIM_STEP_MS": "1",
    # Records of finished requests are to be gone when memory is measured.
    "QUIRE_SCHEDULER_FINISHED_TTL_S": "5",
}


def memory_of(pid: int, what: str = "VmRSS") -> int:
    """A size in bytes of a process, as Linux names it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [size] = [line.split()[1] for line in lines if line.startswith(f"{what}:")]
    return 1024 * int(size)


def memory_of_all(stack: LocalStack, client: redis.Redis) -> dict[str, int]:
    """Redis' without the free pages that its allocator keeps."""
    processes = [p for role in ("gateway", "scheduler", "worker") for p in stack.processes(role)]
    of_redis = client.info("memory")["used_memory"]
    return {**{process.name: memory_of(process.pid) for process in processes}, "redis": of_redis}


async def make_calls(target: str, seed: int, count: int) -> Fuzzer:
    fuzzer = Fuzzer(target, NUM_AT_ONCE)
    await fuzzer.run(Generator(seed, MODEL).calls(count))
    await fuzzer.close()
    return fuzzer


async def fill_prefix_cache(target: str) -> None:
    """Use every block of the pool, so that its index in Redis has its full size."""
    params = SamplingParams(max_tokens=1)
    length = 1000
    async with AsyncClient(target) as client:
        for first in range(NUM_BLOCKS * 16 // length + 2):
            await client.generate([1 + first, *range(1, length)], params)


def keys_of_requests(client: redis.Redis) -> list[str]:
    """All keys but those of pools, of the leadership and of the cluster, whose number is fixed."""
    keys = [key.decode() for key in client.scan_iter()]
    fixed = tuple(f"quire:{{shard:0}}:{name}" for name in ("pool", "leadership", "cluster"))
    return [key for key in keys if not key.startswith(fixed)]


def wait_for_memory(stack: LocalStack, client: redis.Redis, before: Mapping[str, int]) -> None:
    """Wait until every process has at most a fifth more memory than before."""
    deadline = time.monotonic() + MEMORY_S
    while True:
        now = memory_of_all(stack, client)
        grown = {name: size for name, size in now.items() if size > MEMORY_GROWTH * before[name]}
        if not grown:
            return
        assert time.monotonic() < deadline, (before, grown)
        time.sleep(1)


def wait_for_the_end_of_records(client: redis.Redis) -> None:
    deadline = time.monotonic() + RECORDS_S
    while keys := keys_of_requests(client):
        left = {key: client.hgetall(key) for key in keys if client.type(key) == b"hash"}
        assert time.monotonic() < deadline, (keys, left)
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_calls_end_with_a_meaning_and_leave_no_memory_behind(
    redis_server: EmbeddedRedis,
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        # Other tests leave records of ended requests, with a time to live.
        client.flushall()
    with (
        redis.Redis.from_url(redis_server.url) as client,
        LocalStack(MODEL, redis_url=redis_server.url, settings=SETTINGS) as stack,
    ):
        # These load what a first call of each kind needs.
        asyncio.run(make_calls(stack.address, SEED + 1, NUM_FIRST_CALLS))
        asyncio.run(fill_prefix_cache(stack.address))
        before = memory_of_all(stack, client)
        fuzzer = asyncio.run(make_calls(stack.address, SEED, NUM_CALLS))
        assert fuzzer.codes.total() == NUM_CALLS
        assert fuzzer.codes["OK"] > NUM_CALLS / 10
        assert not fuzzer.failed, (len(fuzzer.failed), fuzzer.failed[:3])
        [gateway] = stack.processes("gateway")
        assert memory_of(gateway.pid, "VmHWM") < MAX_PEAK_BYTES
        wait_for_memory(stack, client, before)
        wait_for_the_end_of_records(client)
        # Calls whose clients have gone are no failures.
        log = gateway.spec.address_file.parent / "gateway.log"
        assert "a call failed unexpectedly" not in log.read_text()
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()

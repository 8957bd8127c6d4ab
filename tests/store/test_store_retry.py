"""Calls that are repeated while Redis is unavailable."""

import asyncio

import pytest
from structlog.testing import capture_logs
from waiting import until

from scheduler_svc.store import retry as retry_module
from scheduler_svc.store.errors import StaleEpoch, StoreUnavailable
from scheduler_svc.store.retry import RedisRetry


class Redis:
    """It is away until a test says otherwise."""

    def __init__(self) -> None:
        self.is_away = True
        self.now_s = 100.0
        self.num_failed = 0
        self.retry = RedisRetry(lambda: self.now_s)

    async def call(self) -> int:
        if self.is_away:
            self.num_failed += 1
            raise StoreUnavailable("refused")
        return 7

    async def fail(self) -> None:
        """Wait until some calls have failed from now on."""
        before = self.num_failed
        await until(lambda: self.num_failed >= before + 4, "failed calls")


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> Redis:
    monkeypatch.setattr(retry_module, "RETRY_S", 0)
    return Redis()


def waiting(redis: Redis, count: int) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(redis.retry(redis.call)) for _ in range(count)]


async def test_an_outage_is_logged_once_however_many_calls_wait(redis: Redis) -> None:
    for seconds in (2.5, 0.5):
        redis.is_away = True
        with capture_logs() as logs:
            calls = waiting(redis, 3)
            await redis.fail()
            calls += waiting(redis, 3)
            await redis.fail()
            before_s = redis.retry.unavailable_s
            redis.now_s += seconds
            assert redis.retry.unavailable_s == before_s + seconds
            redis.is_away = False
            assert await asyncio.gather(*calls) == [7] * 6
        first, last = logs
        assert (first["event"], first["reason"]) == ("waiting for Redis", "refused")
        assert (last["event"], last["seconds"]) == ("Redis is available again", seconds)
    assert redis.retry.unavailable_s == 3.0


async def test_an_outage_that_goes_on_for_other_calls_is_logged_again(redis: Redis) -> None:
    """As of a cluster with a node that is away."""

    async def other() -> int:
        if is_other_away:
            raise StoreUnavailable("no node")
        return 8

    is_other_away = True
    with capture_logs() as logs:
        [call] = waiting(redis, 1)
        waits = asyncio.create_task(redis.retry(other))
        await redis.fail()
        redis.is_away = False
        assert await call == 7
        await until(lambda: len(logs) == 3, "the other call")
        is_other_away = False
        assert await waits == 8
    begin, end = "waiting for Redis", "Redis is available again"
    assert [entry["event"] for entry in logs] == [begin, end, begin, end]


async def test_a_response_that_is_an_error_ends_an_outage(redis: Redis) -> None:
    async def call() -> int:
        if redis.is_away:
            return await redis.call()
        raise StaleEpoch("another scheduler leads")

    with capture_logs() as logs:
        waits = asyncio.create_task(redis.retry(call))
        await redis.fail()
        redis.is_away = False
        with pytest.raises(StaleEpoch):
            await waits
    assert [entry["event"] for entry in logs] == ["waiting for Redis", "Redis is available again"]


async def test_an_outage_after_a_cancelled_call_is_logged(redis: Redis) -> None:
    """Its end was not seen."""
    [call] = waiting(redis, 1)
    await redis.fail()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    with capture_logs() as logs:
        calls = waiting(redis, 2)
        await redis.fail()
        calls.pop().cancel()
        await redis.fail()
        redis.is_away = False
        await asyncio.gather(*calls)
    assert [entry["event"] for entry in logs] == ["waiting for Redis", "Redis is available again"]

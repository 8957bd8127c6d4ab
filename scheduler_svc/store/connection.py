"""One connection to Redis, safe against cancelled callers."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from scheduler_svc.store.errors import (
    LeadLost,
    PoolFault,
    RequestFault,
    StaleEpoch,
    StoreError,
    StoreUnavailable,
    WrongStep,
)
from scheduler_svc.store.scripts import Script

Argument = bytes | str | int
T = TypeVar("T")

_SCRIPT_ERRORS: dict[str, type[StoreError]] = {
    "STALE_EPOCH": StaleEpoch,
    "LEAD_LOST": LeadLost,
    "WRONG_STEP": WrongStep,
    "POOL_FAULT": PoolFault,
    "REQUEST_FAULT": RequestFault,
}

# Redis answers, but not to the point: a replica, a full one, one that cannot save or may not obey.
_REFUSALS = (
    AuthenticationError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
)
# The same said by a script, or by codes that the client has no class for.
_REFUSED = re.compile(r"\b(READONLY|OOM|NOPERM|MISCONF|BUSY|NOREPLICAS|MASTERDOWN|LOADING)\b")


class Connection:
    """A caller that is cancelled leaves its call to finish by itself: a reply read half-way would
    be taken for the next call's.

    After a lost connection a call is tried once more; every script is written to be repeated.
    """

    def __init__(self, redis: Redis, timeout_s: float) -> None:
        self.num_calls = 0
        self.waited_s = 0.0  # the sum over all calls
        self._redis = redis
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[Any]] = set()

    @classmethod
    def to(cls, url: str, timeout_s: float) -> Self:
        """ValueError for a URL that is none. Connects with the first call."""
        redis = Redis.from_url(
            url,
            single_connection_client=True,
            protocol=2,
            retry=Retry(NoBackoff(), 1),
            # One timer for each call: the client's own, several a call, cost more than the call.
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
        )
        return cls(redis, timeout_s)

    async def close(self) -> None:
        """Behind the calls under way: the client would give their connection back twice."""
        while self._calls:
            await asyncio.wait(self._calls)
        await self._redis.aclose()

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs a script; its reply, or its error as an exception."""

        async def evaluate() -> Any:
            try:
                return await self._redis.evalsha(script.digest, len(keys), *keys, *args)
            except NoScriptError:  # Redis was restarted, or has never seen it
                return await self._redis.eval(script.body, len(keys), *keys, *args)

        return await self._shielded(evaluate)

    async def run_each(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Runs a script with several keys and arguments in one round trip; the replies."""

        async def evaluate() -> list[Any]:
            pipeline: Pipeline = self._redis.pipeline(transaction=False)
            for keys, args in calls:
                pipeline.execute_command("EVALSHA", script.digest, len(keys), *keys, *args)
            return await pipeline.execute()

        async def evaluate_or_load() -> list[Any]:
            try:
                return await evaluate()
            except NoScriptError:
                await self._redis.script_load(script.body)
                return await evaluate()

        return await self._shielded(evaluate_or_load)

    async def execute(self, command: str, *args: Argument) -> Any:
        """Runs one command; its reply as the client reads it."""
        execute: Callable[..., Awaitable[Any]] = self._redis.execute_command
        return await self._shielded(lambda: execute(command, *args))

    async def snapshot(self, *commands: Sequence[Argument]) -> list[Any]:
        """Runs several commands with no other's in between; their replies."""

        async def transact() -> list[Any]:
            pipeline: Pipeline = self._redis.pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            return await pipeline.execute()

        return await self._shielded(transact)

    async def _shielded(self, call: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.ensure_future(_translated(call, self._timeout_s))
        # Reads the outcome of a call whose caller has gone, so that nothing complains of it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        self.num_calls += 1
        start_s = time.perf_counter()
        try:
            return await asyncio.shield(task)
        finally:
            self.waited_s += time.perf_counter() - start_s


async def _translated(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await call()
    except TimeoutError as error:
        raise StoreUnavailable(f"Redis has not answered for {timeout_s} s") from error
    except (RedisConnectionError, RedisTimeoutError, OSError, *_REFUSALS) as error:
        raise StoreUnavailable(f"Redis: {error}") from error
    except ResponseError as error:
        if _REFUSED.search(str(error)):
            raise StoreUnavailable(f"Redis: {error}") from error
        code, _, message = str(error).partition(" ")
        raise _SCRIPT_ERRORS.get(code, StoreError)(message or code) from error
    except RedisError as error:
        raise StoreError(str(error)) from error

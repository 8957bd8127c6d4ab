"""One connection to Redis, safe against cancelled callers."""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, Self

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

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
from scheduler_svc.store.wire import Argument, ReplyError, Wire, WireLost, pack

_SCRIPT_ERRORS: dict[str, type[StoreError]] = {
    "STALE_EPOCH": StaleEpoch,
    "LEAD_LOST": LeadLost,
    "WRONG_STEP": WrongStep,
    "POOL_FAULT": PoolFault,
    "REQUEST_FAULT": RequestFault,
}

# Redis answers, but not to the point: a replica, a full one, one that cannot save or may not obey.
# Where a script meets such an answer it stands within the script's error.
_REFUSED = re.compile(
    r"\b(READONLY|OOM|NOAUTH|WRONGPASS|NOPERM|MISCONF|BUSY|NOREPLICAS|MASTERDOWN|LOADING)\b"
)
_UNKNOWN_SCRIPT = "NOSCRIPT"


class Connection:
    """A caller that is cancelled leaves its call to finish by itself.

    The Redis client connects, with all that a URL may ask for; from there on its socket is ours,
    for what else it does for a call costs several times the call. After a lost connection a call is
    tried once more; every script is written to be repeated.
    """

    def __init__(self, link: AbstractConnection, timeout_s: float) -> None:
        self.num_calls = 0
        self.waited_s = 0.0  # the sum over all calls
        self._link = link
        self._timeout_s = timeout_s
        self._wire: Wire | None = None
        self._connecting = asyncio.Lock()

    @classmethod
    def to(cls, url: str, timeout_s: float) -> Self:
        """ValueError for a URL that is none. Connects with the first call."""
        pool = ConnectionPool.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )
        # A URL may ask for another one, which nobody here reads.
        pool.connection_kwargs["protocol"] = 2
        return cls(pool.make_connection(), timeout_s)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Behind the calls under way."""
        async with self._connecting:
            if self._wire is not None:
                await self._wire.close()
                self._wire = None
            await self._link.disconnect(nowait=True)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs a script; its reply, or its error as an exception."""
        command = pack(("EVALSHA", script.digest, len(keys), *keys, *args))
        return _sound(await self._call([command], script))[0]

    async def run_each(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Runs a script with several keys and arguments in one round trip; the replies."""
        commands = [
            pack(("EVALSHA", script.digest, len(keys), *keys, *args)) for keys, args in calls
        ]
        return _sound(await self._call(commands, script))

    async def execute(self, command: str, *args: Argument) -> Any:
        """Runs one command; its reply as Redis gives it, flat where it is a map."""
        return _sound(await self._call([pack((command, *args))]))[0]

    async def snapshot(self, *commands: Sequence[Argument]) -> list[Any]:
        """Runs several commands with no other's in between; their replies."""
        packed = [pack(command) for command in (("MULTI",), *commands, ("EXEC",))]
        replies: list[Any] = _sound(await self._call(packed))[-1]
        return _sound(replies)

    async def _call(self, commands: Sequence[bytes], script: Script | None = None) -> list[Any]:
        """The replies to packed commands, errors among them; `script` is the one that they run."""
        self.num_calls += 1
        start_s = time.perf_counter()
        try:
            replies = await self._ask(commands)
            if script is not None and any(map(_is_unknown_script, replies)):
                # Redis was restarted, or has never seen it.
                load = pack(("SCRIPT", "LOAD", script.body))
                loaded, *replies = await self._ask([load, *commands])
                _sound([loaded])
            return replies
        except TimeoutError as error:
            raise StoreUnavailable(f"Redis has not answered for {self._timeout_s} s") from error
        except (WireLost, RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis: {error}") from error
        finally:
            self.waited_s += time.perf_counter() - start_s

    async def _ask(self, commands: Sequence[bytes]) -> list[Any]:
        until = asyncio.get_running_loop().time() + self._timeout_s
        if self._wire is not None and not self._wire.is_lost:
            try:
                return await self._wire.ask(commands)
            except WireLost:
                pass
        async with asyncio.timeout_at(until):
            return await (await self._connected()).ask(commands)

    async def _connected(self) -> Wire:
        async with self._connecting:
            if self._wire is None or self._wire.is_lost:
                await self._connect()
                # It has no public name; nothing else of the client is needed from here on.
                writer = self._link._writer
                assert writer is not None
                self._wire = Wire(writer.transport, self._timeout_s)
            return self._wire

    async def _connect(self) -> None:
        """The client waits with `asyncio.wait_for`, which before Python 3.12 can swallow a
        cancellation: its caller would go on as if nobody had cancelled it."""
        task = asyncio.current_task()
        num_cancelled = task.cancelling() if task else 0
        try:
            await self._link.disconnect(nowait=True)
            await self._link.connect()  # type: ignore[no-untyped-call]
        finally:
            if task is not None and task.cancelling() > num_cancelled:
                raise asyncio.CancelledError


def _is_unknown_script(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and str(reply).startswith(_UNKNOWN_SCRIPT)


def _sound(replies: list[Any]) -> list[Any]:
    """The replies, if there is no error among them; else the first one as an exception."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise _translated(str(reply))
    return replies


def _translated(error: str) -> StoreError:
    if _REFUSED.search(error):
        return StoreUnavailable(f"Redis: {error}")
    code, _, message = error.partition(" ")
    return _SCRIPT_ERRORS.get(code, StoreError)(message or code)

"""One connection to Redis that tolerates cancelled callers and follows the keys."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any, Self

from redis.exceptions import RedisError

from scheduler_svc.store.errors import (
    LeadershipLost,
    NoReply,
    PoolFault,
    RecordMismatch,
    StaleEpoch,
    StoreError,
    StoreUnavailable,
    WrongStep,
)
from scheduler_svc.store.links.link import Link
from scheduler_svc.store.links.urls import link_to
from scheduler_svc.store.resp import Argument, ReplyError, RespConnection, RespConnectionLost, pack
from scheduler_svc.store.scripts import Script

_SCRIPT_ERRORS: dict[str, type[StoreError]] = {
    "STALE_EPOCH": StaleEpoch,
    "LEADERSHIP_LOST": LeadershipLost,
    "WRONG_STEP": WrongStep,
    "POOL_FAULT": PoolFault,
    "RECORD_MISMATCH": RecordMismatch,
}

# Errors of a Redis that responds but cannot serve: out of memory, unable to save, no permission, a
# slot that is being moved. Inside a script they are part of the script's error.
_REFUSED = re.compile(
    r"\b(OOM|NOAUTH|WRONGPASS|NOPERM|MISCONF|BUSY|MASTERDOWN|LOADING|TRYAGAIN)\b"
    # NOPERM within a script, in Redis 6.
    r"|The user executing the script can't "
    # Of a script on a node that gives its slot away, see slot.lua.
    r"|access a non local key"
    # Of a server whose operator has renamed or removed a command.
    r"|(?i:\bunknown (redis )?command\b)"
)
# Errors of a server that does not take writes: a replica, a node without the keys' slot, or a
# primary whose replicas follow another one already (Sentinels demote it about ten seconds later).
_ELSEWHERE = re.compile(r"\b(READONLY|MOVED|ASK|CLUSTERDOWN|NOREPLICAS)\b")
_UNKNOWN_SCRIPT = "NOSCRIPT"
# What follows repeats the arguments of the call, prompts among them.
_ARGUMENTS = ", with args"


class Connection:
    """Runs commands and scripts. The call of a cancelled caller completes without it.

    After a lost connection a call is retried once; every script is idempotent.
    """

    def __init__(self, link: Link, timeout_s: float) -> None:
        self.num_calls = 0
        # Connections so far: each one may be to another server.
        self.num_opened = 0
        self._link = link
        self._timeout_s = timeout_s
        self._resp: RespConnection | None = None
        self._connecting = asyncio.Lock()

    @classmethod
    def to(cls, url: str, timeout_s: float, password: str | None = None, key: str = "") -> Self:
        """Create a connection that connects at the first call. ValueError for an invalid URL.
        `password` is used if the URL has none; of a cluster, the node that has the key is."""
        return cls(link_to(url, timeout_s, password, key), timeout_s)

    async def close(self) -> None:
        """Close after the calls in progress."""
        async with self._connecting:
            if self._resp is not None:
                await self._resp.close()
                self._resp = None
            await self._link.disconnect()

    def reopen(self) -> None:
        """Send further calls, and those in progress, over a new connection: of several servers, to
        the one that takes writes now."""
        if self._resp is not None:
            self._resp.drop()

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run a script; return its reply or raise its error."""
        command = pack(("EVALSHA", script.digest, len(keys), *keys, *args))
        return _checked(await self._call([command], script))[0]

    def begin(self, packed: bytes, on_end: Callable[[list[Any] | Exception], None]) -> bool:
        """Send a packed command if the connection is open; else do nothing and return False.

        `on_end` gets the only reply in a list. If that is an error, or there is none, the caller
        repeats the call by `run`, which handles it.
        """
        resp = self._resp
        if resp is None or resp.is_lost:
            return False
        self.num_calls += 1
        resp.send_packed(packed, 1, on_end)
        return True

    async def run_each(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]
    ) -> list[Any]:
        """Run a script once per keys and arguments in one round trip; return the replies."""
        commands = [
            pack(("EVALSHA", script.digest, len(keys), *keys, *args)) for keys, args in calls
        ]
        return _checked(await self._call(commands, script))

    async def execute(self, command: str, *args: Argument) -> Any:
        """Run one command; return its reply unchanged, with maps as flat lists."""
        return _checked(await self._call([pack((command, *args))]))[0]

    async def snapshot(self, *commands: Sequence[Argument]) -> list[Any]:
        """Run several commands as a transaction; return their replies."""
        packed = [pack(command) for command in (("MULTI",), *commands, ("EXEC",))]
        replies: list[Any] = _checked(await self._call(packed))[-1]
        return _checked(replies)

    async def _call(self, commands: Sequence[bytes], script: Script | None = None) -> list[Any]:
        """Send packed commands; return their replies, errors included. `script`: what they run."""
        self.num_calls += 1
        try:
            replies = await self._send(commands)
            if self._resp is not None and any(map(_is_elsewhere, replies)):
                # Nothing was written. Once more, where the keys are now.
                self._resp.drop()
                replies = await self._send(commands)
            if script is not None and any(map(_is_unknown_script, replies)):
                # Redis was restarted, or has never loaded the script.
                load = pack(("SCRIPT", "LOAD", script.body))
                loaded, *replies = await self._send([load, *commands])
                _checked([loaded])
            return replies
        except TimeoutError as error:
            raise NoReply(f"Redis has not responded for {self._timeout_s} s") from error
        except (RespConnectionLost, RedisError, OSError) as error:
            raise NoReply(f"Redis: {error}") from error

    async def _send(self, commands: Sequence[bytes]) -> list[Any]:
        until = asyncio.get_running_loop().time() + self._timeout_s
        if self._resp is not None and not self._resp.is_lost:
            try:
                return await self._resp.send(commands)
            except RespConnectionLost:
                pass
        async with asyncio.timeout_at(until):
            return await (await self._connected()).send(commands)

    async def _connected(self) -> RespConnection:
        async with self._connecting:
            if self._resp is None or self._resp.is_lost:
                self._resp = RespConnection(await self._connect(), self._timeout_s)
                self.num_opened += 1
            return self._resp

    async def _connect(self) -> asyncio.WriteTransport:
        """Connect, and raise a cancellation that the client swallows: before Python 3.12 its
        `asyncio.wait_for` may lose one."""
        task = asyncio.current_task()
        num_cancelled = task.cancelling() if task else 0
        try:
            return await self._link.connect()
        finally:
            if task is not None and task.cancelling() > num_cancelled:
                raise asyncio.CancelledError


def _is_unknown_script(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and str(reply).startswith(_UNKNOWN_SCRIPT)


def _is_elsewhere(reply: Any) -> bool:
    if not isinstance(reply, ReplyError) or _script_error(str(reply)) is not None:
        return False
    return _ELSEWHERE.search(str(reply)) is not None


def _script_error(error: str) -> type[StoreError] | None:
    """What a script has raised itself; None for an error of Redis. Its message may name a request,
    whose id a client chose: ids like OOM and ASK say nothing about Redis."""
    return _SCRIPT_ERRORS.get(error.partition(" ")[0])


def _checked(replies: list[Any]) -> list[Any]:
    """Return the replies; raise the first error among them."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise _translated(str(reply))
    return replies


def _translated(error: str) -> StoreError:
    code, _, message = error.partition(" ")
    if (kind := _script_error(error)) is not None:
        return kind(message or code)
    error = error.partition(_ARGUMENTS)[0]
    if _REFUSED.search(error) or _ELSEWHERE.search(error):
        return StoreUnavailable(f"Redis: {error}")
    return StoreError(message or code)

"""Finds the leader of a shard among the configured addresses and those that schedulers name."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable

import structlog

from gateway_svc.scheduler.leader_stream import HandshakeFailedError, LeaderStream, NotLeadingError
from quire.service.addresses import NameResolver, check_address

log = structlog.get_logger()

# For which the address that is named as the leader's is tried alone, so that the leaders of many
# shards are not searched for at all addresses.
_HEAD_START_S = 0.1
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5
# An address is tried at once when it is suggested, but not more often than this in one search:
# schedulers may name each other while the shard has no leader.
_MAX_HURRIED = 3


class LeaderDiscovery:
    """Tries all addresses concurrently, so that one that hangs delays no other. An address that was
    suggested has a head start."""

    def __init__(
        self, names: Iterable[str], connect: Callable[[str], Awaitable[LeaderStream]]
    ) -> None:
        """`connect` opens a stream to an address; NotLeadingError if no leader is there."""
        # Set by new addresses and by the end of the search.
        self._wake = asyncio.Event()
        self.resolver = NameResolver(names, self._wake.set)
        self._connect = connect
        # Where another scheduler says the leader is.
        self._suggested: str | None = None
        # Of the search in progress, by address: set to end a back-off.
        self._is_due: dict[str, asyncio.Event] = {}

    def suggest(self, address: str) -> None:
        """Try this address at once if a search is in progress, or first in the next one. No effect
        if it was the last one that was suggested."""
        if address == self._suggested:
            return
        try:
            self._suggested = check_address(address)
        except ValueError:
            log.warning("the leader's address is not valid", address=address)
            return
        if address in self._is_due:
            self._is_due[address].set()
        self._wake.set()

    async def find(self) -> LeaderStream:
        """Return a stream to the first scheduler that responds as the leader."""
        found: asyncio.Future[LeaderStream] = asyncio.get_running_loop().create_future()
        found.add_done_callback(lambda _: self._wake.set())
        attempts: dict[str, asyncio.Task[None]] = {}
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._suggested is not None:
                self._start_attempts({self._suggested}, attempts, found)
                await self._wait_for_head_start()
            tasks.append(asyncio.create_task(self.resolver.run()))
            while not found.done():
                self._wake.clear()
                suggested = set() if self._suggested is None else {self._suggested}
                self._start_attempts(self.resolver.addresses | suggested, attempts, found)
                await self._wake.wait()
            return found.result()
        finally:
            tasks += attempts.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._is_due.clear()

    def _start_attempts(
        self,
        addresses: Iterable[str],
        attempts: dict[str, asyncio.Task[None]],
        found: asyncio.Future[LeaderStream],
    ) -> None:
        for address in addresses:
            if address not in attempts:
                attempts[address] = asyncio.create_task(self._try_repeatedly(address, found))

    async def _wait_for_head_start(self) -> None:
        """Wait until the first attempt has an end, or its head start is over."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEAD_START_S):
                await self._wake.wait()

    async def _try_repeatedly(self, address: str, found: asyncio.Future[LeaderStream]) -> None:
        backoff_s = _FIRST_BACKOFF_S
        num_hurried = 0
        # Each is logged once in a search, not at every attempt: they may alternate.
        reasons = set[str]()
        is_due = self._is_due[address] = asyncio.Event()
        while not found.done():
            try:
                leader = await self._connect(address)
            except NotLeadingError as error:
                reason = str(error)
                if reason not in reasons:
                    reasons.add(reason)
                    if isinstance(error, HandshakeFailedError):
                        log.warning("TLS with a scheduler fails", address=address, reason=reason)
                    else:
                        log.info("not the leader", address=address, reason=reason)
                self._wake.set()
                pause_s = backoff_s * random.uniform(0.5, 1)
                if num_hurried == _MAX_HURRIED:
                    await asyncio.sleep(pause_s)
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await is_due.wait()
                            num_hurried += 1
                    is_due.clear()
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            else:
                if found.done():
                    leader.close()
                else:
                    found.set_result(leader)

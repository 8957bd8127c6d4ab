"""Shares of tenants' limits, and their fairness, over all shards: once a second, and when a request
finds no room."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Self

import structlog

from scheduler_svc.cluster.cluster_map import MAX_SHARDS
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.core.limits import Usage
from scheduler_svc.engine.engine import Engine
from scheduler_svc.store.cluster import ClusterStore
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.ticks import until_tick

log = structlog.get_logger()

EXCHANGE_S = 1.0
# While a shard asks for what others do not use any more, and for how long after it has asked.
SCARCE_S = 0.1
SCARCE_FOR_S = 2.0
# Minimum time between two exchanges.
GAP_S = 0.02
# A request that finds no room waits no longer for an exchange.
ASK_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one shard has reported."""

    epoch: int = 0
    # By shard, how many of its requests for room the reporting shard has seen.
    acknowledged_asks: Sequence[int] = ()
    # By principal.
    usages: Mapping[str, Usage] = field(default_factory=dict)

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed report. ValueError for anything else."""
        try:
            epoch, acknowledged_asks, usages = json.loads(packed)
            return cls(
                int(epoch),
                [int(number) for number in acknowledged_asks],
                {name: Usage.parse(used) for name, used in usages.items()},
            )
        except (TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(repr(error)) from error

    def pack(self) -> bytes:
        """For Redis."""
        return json.dumps(
            [
                self.epoch,
                self.acknowledged_asks,
                {n: astuple(used) for n, used in self.usages.items()},
            ]
        ).encode()

    def has_acknowledged(self, shard: int, num_asks: int) -> bool:
        """Whether the reporting shard has seen so many requests for room of `shard`."""
        return shard < len(self.acknowledged_asks) and self.acknowledged_asks[shard] >= num_asks


class TenantExchange:
    """Reports what tenants use in one shard, and takes its shares of their limits from the reports
    of all shards. What others have served a tenant counts in its counter here."""

    def __init__(
        self,
        shard: int,
        epoch: int,
        engine: Engine,
        membership: Membership,
        store: ClusterStore,
    ) -> None:
        self._shard = shard
        self._epoch = epoch
        self._engine = engine
        self._membership = membership
        self._store = store
        self._reported_at = time.monotonic()
        # The last report of each other shard.
        self._known: dict[int, Report] = {}
        # The last reports of all shards, packed, as read for a request that waits.
        self._last_reports: Mapping[int, bytes] = {}
        # By shard, a report that could not be read.
        self._unreadable: dict[int, bytes] = {}
        # Times that this shard has asked for what others do not use any more; those of the others.
        # From a number on that no former leader of the shard has reached, since what it was
        # acknowledged is still in the reports of the others.
        self.num_asks = epoch
        self._num_other_asks = 0
        # Until then, of time.monotonic, another one asks.
        self._is_scarce_until = -math.inf
        self._lock = asyncio.Lock()
        # Held by the request that reads the others' acknowledgements, for all that wait for it.
        self._reading_lock = asyncio.Lock()
        self._num_begun = 0
        self._has_succeeded = False
        # A request waits for the next exchange.
        self._is_due = asyncio.Event()
        # Replaced whenever it is set: an exchange has ended.
        self._has_ended = asyncio.Event()
        if membership.map.num_shards > 1:
            # Before the first exchange no request has a share.
            self._divide(Report(), membership.map.num_shards)

    async def run(self) -> None:
        """Exchange until cancelled. A failed exchange is made up for by the next one."""
        loop = asyncio.get_running_loop()
        self._membership.listen(self._on_heartbeat)
        try:
            while True:
                if self._membership.map.num_shards > 1:
                    with contextlib.suppress(StoreUnavailable):
                        await self.exchange()
                not_before = loop.time() + GAP_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s()):
                        await self._is_due.wait()
                await asyncio.sleep(max(0.0, not_before - loop.time()))
        finally:
            self._membership.stop_listening(self._on_heartbeat)

    @property
    def _is_scarce(self) -> bool:
        """Whether another shard has just asked for what is not used any more."""
        return time.monotonic() < self._is_scarce_until

    def _interval_s(self) -> float:
        """The time until the next exchange."""
        now_s = asyncio.get_running_loop().time()
        return SCARCE_S if self._is_scarce else until_tick(EXCHANGE_S, now_s)

    def _on_heartbeat(self) -> None:
        """Give up what is not used as soon as another shard asks for it."""
        loads = enumerate(self._membership.loads)
        num_asks = sum(load.num_asks for shard, load in loads if shard != self._shard)
        if num_asks != self._num_other_asks:
            self._num_other_asks = num_asks
            self._is_scarce_until = time.monotonic() + SCARCE_FOR_S
            self._is_due.set()

    async def ask(self, within_s: float = 0.0) -> bool:
        """Wait for an exchange that begins after this call, soon; return whether it succeeded.
        `within_s`: let others give up before what they do not use any more. Those that have not
        reported after so long are not waited for."""
        if within_s:
            self.num_asks += 1
            self._membership.beat_soon()
            with contextlib.suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._wait_until_acknowledged(self.num_asks)
        num_begun = self._num_begun
        self._is_due.set()
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                while self._num_begun <= num_begun or self._lock.locked():
                    await self._has_ended.wait()
        except TimeoutError:
            return False
        return self._has_succeeded

    async def _wait_until_acknowledged(self, num_asks: int) -> None:
        """Wait until all others have reported since they know that this shard has asked so many
        times. Raises StoreUnavailable."""
        others = [shard for shard in range(self._membership.map.num_shards) if shard != self._shard]
        while not all(self._has_acknowledged(shard, num_asks) for shard in others):
            async with self._reading_lock:
                await asyncio.sleep(GAP_S)
                if not all(self._has_acknowledged(shard, num_asks) for shard in others):
                    self._last_reports = await self._store.read_reports()

    def _has_acknowledged(self, shard: int, num_asks: int) -> bool:
        report = self._parse(shard, self._last_reports.get(shard))
        return report is not None and report.has_acknowledged(self._shard, num_asks)

    async def exchange(self, num_shards: int | None = None) -> None:
        """Report, and read the reports of the others. Raises StoreError. `num_shards`: so many are
        about to be there."""
        async with self._lock:
            self._is_due.clear()
            self._num_begun += 1
            self._has_succeeded = False
            try:
                await self._exchange(num_shards or self._membership.map.num_shards)
                self._has_succeeded = True
            finally:
                self._has_ended.set()
                self._has_ended = asyncio.Event()

    def undivide(self) -> None:
        """Let this shard use every limit as a whole again: there are no others after all."""
        self._engine.quotas.divide(self._shard, [{}])

    async def _exchange(self, num_shards: int) -> None:
        if not self._engine.quotas.has_others:
            # What is claimed then is a share, and not the limit.
            self._divide(Report(), num_shards)
        own = self._report()
        packed = await self._store.exchange(self._shard, own.pack())
        # Those that have just been added may be in no map that was read here.
        num_shards = max(num_shards, *(shard + 1 for shard in packed if shard < MAX_SHARDS))
        for shard in range(num_shards):
            if shard != self._shard:
                # One that Redis has lost, or that cannot be read, is as it was.
                known = self._known.get(shard, Report())
                report = self._parse(shard, packed.get(shard)) or known
                self._count_served(known, report)
                self._known[shard] = report
        self._divide(own, num_shards)

    def _parse(self, shard: int, packed: bytes | None) -> Report | None:
        if packed is None:
            return None
        try:
            return Report.parse(packed)
        except ValueError as error:
            if self._unreadable.get(shard) != packed:
                # Logged once, not at every exchange.
                self._unreadable[shard] = packed
                log.error("the tenants of a shard are not readable", shard=shard, reason=str(error))
            return None

    def _divide(self, own: Report, num_shards: int) -> None:
        known = {**self._known, self._shard: own}
        reports = [known.get(shard, Report()).usages for shard in range(num_shards)]
        self._engine.quotas.divide(self._shard, reports)

    def _report(self) -> Report:
        engine = self._engine
        if engine.shares.has_tenants:
            # Otherwise no limit and no share depends on it.
            engine.count_output()
        now = time.monotonic()
        since_s, self._reported_at = max(now - self._reported_at, 1e-3), now
        usages = engine.quotas.report(
            since_s, engine.waiting.num_tokens_of, keeps_spare=not self._is_scarce
        )
        return Report(
            self._epoch,
            [load.num_asks for load in self._membership.loads],
            {
                name: replace(usage, served=engine.shares.served(name))
                for name, usage in usages.items()
            },
        )

    def _count_served(self, known: Report, report: Report) -> None:
        if known.epoch != report.epoch:
            # Its leader is new, and began to count with its term.
            return
        for name, usage in report.usages.items():
            served = usage.served - known.usages.get(name, usage).served
            if served > 0:
                self._engine.shares.add_served(name, served)

"""Shares of tenants' limits, and their fairness, over all shards: once a second."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Self

from scheduler_svc.cluster.membership import Membership
from scheduler_svc.core.limits import Usage
from scheduler_svc.engine.engine import Engine
from scheduler_svc.store.cluster import ClusterStore
from scheduler_svc.store.errors import StoreUnavailable

EXCHANGE_S = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one shard has reported."""

    epoch: int = 0
    # By principal.
    usages: Mapping[str, Usage] = field(default_factory=dict)

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """Read a packed report; an empty one for anything else."""
        try:
            epoch, usages = json.loads(packed)
            return cls(epoch, {str(name): Usage(*used) for name, used in usages.items()})
        except (ValueError, TypeError, AttributeError):
            return cls()

    def pack(self) -> bytes:
        """For Redis."""
        return json.dumps(
            [self.epoch, {n: astuple(used) for n, used in self.usages.items()}]
        ).encode()


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = shard
        self._epoch = epoch
        self._engine = engine
        self._membership = membership
        self._store = store
        self._clock = clock
        self._reported_at = clock()
        # The last report of each other shard.
        self._known: dict[int, Report] = {}

    async def run(self) -> None:
        """Exchange until cancelled, at once for the first time: until then this shard allows whole
        limits. A failed exchange is made up for by the next one."""
        while True:
            if self._membership.map.num_shards > 1:
                with contextlib.suppress(StoreUnavailable):
                    await self.exchange()
            await asyncio.sleep(EXCHANGE_S)

    async def exchange(self) -> None:
        """Report, and read the reports of the others. Raises StoreError."""
        own = self._report()
        num_shards = self._membership.map.num_shards
        packed = await self._store.exchange(self._shard, own.pack())
        reports = [Report.parse(packed.get(shard, b"")) for shard in range(num_shards)]
        reports[self._shard] = own
        self._engine.quotas.divide(self._shard, [report.usages for report in reports])
        for shard, report in enumerate(reports):
            if shard != self._shard:
                self._count_served(self._known.get(shard, Report()), report)
                self._known[shard] = report

    def _report(self) -> Report:
        engine = self._engine
        engine.count_output()
        now = self._clock()
        since_s, self._reported_at = max(now - self._reported_at, 1e-3), now
        usages = engine.quotas.report(since_s, engine.waiting.num_tokens_of)
        return Report(
            self._epoch,
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

"""The load of each shard: as reported, and as this gateway has changed it since."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway_svc.scheduler.shard_choice import ShardLoad


class OwnRequests(Protocol):
    """This gateway's requests on one shard."""

    is_connected: bool
    num_sequences: int

    @property
    def num_accepted_sequences(self) -> int:
        """Those that the shard has counted."""


@dataclass(frozen=True, slots=True)
class ShardReport:
    num_workers: int
    num_live: int


@dataclass(frozen=True, slots=True)
class _Known:
    report: ShardReport
    # The part of the reported sequences that were this gateway's.
    num_own: int


class ShardLoads:
    """Estimates the loads between two reports."""

    def __init__(self, shards: Sequence[OwnRequests]) -> None:
        """`shards` may grow."""
        self._shards = shards
        self._known: dict[int, _Known] = {}

    def report(self, source: int, reports: Sequence[ShardReport]) -> None:
        """Update the loads to what a shard's leader reports. About another shard its own leader
        knows more."""
        for shard, report in enumerate(reports):
            own = self._shards[shard]
            if shard == source or shard not in self._known:
                self._known[shard] = _Known(report, own.num_accepted_sequences)

    def __getitem__(self, shard: int) -> ShardLoad:
        known, own = self._known.get(shard), self._shards[shard]
        if known is None or not own.is_connected:
            return ShardLoad(0, 0)
        num_live = known.report.num_live + own.num_sequences - known.num_own
        return ShardLoad(known.report.num_workers, max(0, num_live))

    def all(self) -> list[ShardLoad]:
        return [self[shard] for shard in range(len(self._shards))]

"""Folds what requests have produced into their records in Redis, off the path of the steps."""

import asyncio
from collections.abc import Collection, Iterable

import structlog

from scheduler_svc.core.restoring import ending_of
from scheduler_svc.core.sequence import EndReason, Group, Sequence
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.requests import OutputRun, RequestKey, RequestRecord
from scheduler_svc.store.store import Store

log = structlog.get_logger()

RETRY_S = 0.2
# An end that the journal tells as well waits so long for others.
GATHER_S = 0.25
# Steps go on between such parts.
FOLDED_AT_ONCE = 32
ENDED_AT_ONCE = 64


class Recorder:
    """Ends the records of requests that are over, in batches, in the order they ended."""

    def __init__(self, store: Store, finished_ttl_s: int, finished_max_bytes: int) -> None:
        self._store = store
        self._finished_ttl_s = finished_ttl_s
        self._finished_max_bytes = finished_max_bytes
        self._left: list[Group] = []
        self._unanswered: list[RequestRecord] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._pending = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def unwritten(self) -> list[Group]:
        """Requests that are over, of whose ends Redis may not know."""
        return list(self._left)

    def left(self, group: Group) -> None:
        """A request is over."""
        self._left.append(group)
        if not _is_told_by_its_tokens(group):
            self._pending.set()
        elif self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_S, self._gathered)

    def _gathered(self) -> None:
        self._gathering = None
        self._pending.set()

    def unanswered(self, records: Iterable[RequestRecord]) -> None:
        """Records that Redis may or may not have written; their requests were turned away."""
        self._unanswered.extend(records)
        self._pending.set()

    async def run(self) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            try:
                await self.flush()
            except StoreUnavailable as error:
                log.warning("records wait for Redis", error=str(error))
                self._pending.set()
                await asyncio.sleep(RETRY_S)

    async def fold(self, sequences: list[Sequence]) -> None:
        """Brings the records of running sequences up to what is journaled."""
        await self.flush()
        for start in range(0, len(sequences), FOLDED_AT_ONCE):
            async with self._writing:
                part = sequences[start : start + FOLDED_AT_ONCE]
                await self._fold([other for other in part if not other.group.is_closed])

    async def settle(self, keys: Collection[RequestKey]) -> None:
        """Has Redis know of these requests what is known here, before somebody asks for them."""
        if self._unanswered or any(group.key in keys for group in self._left):
            await self.flush()

    async def flush(self) -> None:
        """Writes what there is. Repeating it after a failure is harmless."""
        async with self._writing:
            if records := list(self._unanswered):
                await self._store.discard(records)
                del self._unanswered[: len(records)]
            while self._left:
                await self._end(self._left[:ENDED_AT_ONCE])

    async def _end(self, batch: list[Group]) -> None:
        """Writes the ends of those who left first."""
        await self._fold([sequence for group in batch for sequence in group.sequences])
        endings = [ending_of(group) for group in batch]
        await self._store.finish(endings, self._finished_ttl_s, self._finished_max_bytes)
        for group in batch:
            group.is_closed = True
        del self._left[: len(batch)]

    async def _fold(self, sequences: list[Sequence]) -> None:
        behind = [other for other in sequences if other.num_folded < other.num_journaled]
        if behind:
            reach = [other.num_journaled for other in behind]
            await self._store.fold([_run(other) for other in behind])
            for sequence, num_folded in zip(behind, reach, strict=True):
                sequence.num_folded = num_folded


def _is_told_by_its_tokens(group: Group) -> bool:
    """Whoever finds its tokens in the journal knows that it is over."""
    return group.error is None and all(
        sequence.end is not None
        and sequence.end.reason is not EndReason.STOP_STRING
        and sequence.num_kept_tokens is None
        for sequence in group.sequences
    )


def _run(sequence: Sequence) -> OutputRun:
    first, end = sequence.num_folded, sequence.num_journaled
    return OutputRun(
        sequence.group.key,
        sequence.choice,
        first,
        sequence.journaled[first:],
        sequence.logprobs_of(first, end),
    )

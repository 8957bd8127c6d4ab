"""Writes output and endings of requests to their records in Redis, off the path of the steps."""

import asyncio
from collections.abc import Collection, Iterable

from scheduler_svc.core.request import EndReason
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.engine.record_conversion import ending_of
from scheduler_svc.store.requests import OutputRange, RequestKey, RequestRecord
from scheduler_svc.store.store import Store

# Delay by which endings that the journal implies are written together.
END_BATCH_DELAY_S = 0.25
# Sequences and requests per write; steps run between writes.
COMPACT_BATCH = 32
FINISH_BATCH = 64


class RecordWriter:
    """Ends the records of ended requests, in batches, in the order in which they ended."""

    def __init__(self, store: Store, finished_ttl_s: int, finished_max_bytes: int) -> None:
        self._store = store
        self._finished_ttl_s = finished_ttl_s
        self._finished_max_bytes = finished_max_bytes
        self._ended: list[Group] = []
        self._rejected: list[RequestRecord] = []
        self._batch_timer: asyncio.TimerHandle | None = None
        self._pending = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def unwritten(self) -> list[Group]:
        """Ended requests whose endings may be missing in Redis."""
        return list(self._ended)

    def enqueue(self, group: Group) -> None:
        """Queue the ending of a request."""
        self._ended.append(group)
        if not _is_implied_by_journal(group):
            self._pending.set()
        elif self._batch_timer is None:
            loop = asyncio.get_running_loop()
            self._batch_timer = loop.call_later(END_BATCH_DELAY_S, self._write_endings)

    def _write_endings(self) -> None:
        self._batch_timer = None
        self._pending.set()

    def discard(self, records: Iterable[RequestRecord]) -> None:
        """Queue the deletion of records of rejected requests; Redis may not have them."""
        self._rejected.extend(records)
        self._pending.set()

    async def run(self) -> None:
        """Write what is queued until cancelled."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            await self._store.retry(self.flush)

    async def compact(self, sequences: list[Sequence]) -> None:
        """Bring the records of running sequences up to what is journaled."""
        await self.flush()
        for start in range(0, len(sequences), COMPACT_BATCH):
            async with self._writing:
                part = sequences[start : start + COMPACT_BATCH]
                await self._compact([other for other in part if not other.group.is_end_recorded])

    async def sync(self, keys: Collection[RequestKey]) -> None:
        """Write what is queued if it may concern these requests; call it before loading them."""
        if self._rejected or any(group.key in keys for group in self._ended):
            await self.flush()

    async def flush(self) -> None:
        """Write what is queued. Repeating it after a failure is harmless."""
        async with self._writing:
            if records := list(self._rejected):
                await self._store.discard(records)
                del self._rejected[: len(records)]
            while self._ended:
                await self._finish(self._ended[:FINISH_BATCH])

    async def _finish(self, batch: list[Group]) -> None:
        """Write the oldest queued endings."""
        await self._compact([sequence for group in batch for sequence in group.outputs])
        endings = [ending_of(group) for group in batch]
        await self._store.finish(endings, self._finished_ttl_s, self._finished_max_bytes)
        for group in batch:
            group.is_end_recorded = True
        del self._ended[: len(batch)]

    async def _compact(self, sequences: list[Sequence]) -> None:
        behind = [other for other in sequences if other.num_recorded < other.num_journaled]
        if behind:
            ends = [other.num_journaled for other in behind]
            await self._store.append_output([_range_of(other) for other in behind])
            for sequence, end in zip(behind, ends, strict=True):
                sequence.num_recorded = end


def _is_implied_by_journal(group: Group) -> bool:
    """Whether recovery can derive the ending from the journaled tokens."""
    return group.error is None and all(
        sequence.end is not None
        and sequence.end.reason is not EndReason.STOP_STRING
        and sequence.num_kept_tokens is None
        for sequence in group.sequences
    )


def _range_of(sequence: Sequence) -> OutputRange:
    first, end = sequence.num_recorded, sequence.num_journaled
    return OutputRange(
        sequence.group.key,
        sequence.choice,
        first,
        sequence.journaled[first:],
        sequence.logprobs_of(first, end),
        bytes(sequence.prompt_logprobs) if first == 0 else b"",
    )

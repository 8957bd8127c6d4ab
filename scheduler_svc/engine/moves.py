"""Moves waiting requests to shards that have room for them."""

import asyncio
import math
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from scheduler_svc.cluster.balance import moves, moves_without_workers
from scheduler_svc.cluster.heartbeats import HEARTBEAT_S
from scheduler_svc.cluster.load import ShardLoad
from scheduler_svc.cluster.membership import Membership
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.engine.claims import Claims
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.record_conversion import from_record, to_record
from scheduler_svc.engine.record_writer import RecordWriter
from scheduler_svc.store.errors import NoReply, StoreUnavailable
from scheduler_svc.store.inbox import Moved
from scheduler_svc.store.requests import RecordOutcome, RequestKey
from scheduler_svc.store.store import Store
from scheduler_svc.ticks import sleep_ticks

log = structlog.get_logger()

# The inbox is read so often even if no other shard has had waiting requests.
LOOK_S = 2.0
# The time after which a shard without a worker gives its requests to others that have queues, too:
# more than a leader needs to open its lanes, and less than a worker to load a model.
STRANDED_S = 5.0
# The time for which requests wait that another shard may have got, while this shard's part of Redis
# responds and the other one's does not.
REPEAT_S = 10.0
# Requests that are moved in one call.
_BATCH = 64


class Moves:
    """Gives waiting requests of one shard to others, and takes those that others give.

    A request is in the other shard's inbox before it leaves this one, so that it is never lost;
    if this leader ends in between, or Redis does not say in time whether it is there, both shards
    run it, with the same output.
    """

    def __init__(
        self,
        shard: int,
        membership: Membership,
        engine: Engine,
        store: Store,
        stores: Mapping[int, Store],
        record_writer: RecordWriter,
        claims: Claims,
        is_leading: Callable[[], bool],
        on_given: Callable[[Group, int], None],
        on_taken: Callable[[Group], None],
    ) -> None:
        """`stores`: those of all shards that this process has begun with. `is_leading`: whether the
        lease has certainly not expired. `on_given` is called with a request that another shard has,
        and its number; `on_taken` with one that another shard has given."""
        self._shard = shard
        self._membership = membership
        self._engine = engine
        self._store = store
        self._stores = stores
        self._record_writer = record_writer
        self._claims = claims
        self._is_leading = is_leading
        self._on_given = on_given
        self._on_taken = on_taken
        # Requests that have left the engine and are not another shard's yet. They can be cancelled.
        self.giving: dict[RequestKey, Group] = {}
        # Since when the shard has no worker; None while it has one.
        self._alone_since: float | None = None
        # Requests that have waited since the last look.
        self._waiting: set[Group] = set()
        self._taking = asyncio.Lock()
        # By requests that are being taken, their new sequence ids.
        self._first_ids: dict[RequestKey, int] = {}

    async def run(self) -> None:
        """Move requests until cancelled. Errors of the store but StoreUnavailable are raised."""
        taken_at = -math.inf
        while True:
            await sleep_ticks(HEARTBEAT_S)
            if not self._is_leading():
                # Another leader may run these requests: the inboxes of others have no fence.
                continue
            now = asyncio.get_running_loop().time()
            try:
                if self._others_wait() or now - taken_at > LOOK_S:
                    await self.take()
                    taken_at = now
                await self._give_surplus()
            except StoreUnavailable:
                continue

    def _others_wait(self) -> bool:
        """Whether another shard has waiting requests, which it may have given."""
        loads = enumerate(self._membership.loads)
        return any(load.num_waiting for shard, load in loads if shard != self._shard)

    # Giving

    async def _give_surplus(self) -> None:
        planned = moves_without_workers if self._is_stranded() else moves
        if not self._engine.waiting:
            self._waiting = set()
            return
        candidates = self._candidates()
        ripe = [group for group in candidates if group in self._waiting]
        self._waiting = set(candidates)
        loads = self._membership.loads
        for target, count in planned(self._shard, len(ripe), loads).items():
            if target not in self._stores:
                # It was just added to the map.
                continue
            groups = self._fitting(ripe, min(count, _BATCH), loads[target])
            ripe = [group for group in ripe if group not in groups]
            if any(map(_has_output, groups)):
                # Another model would continue it.
                model = await self._stores[target].model()
                if model != self._engine.output_model:
                    groups = [group for group in groups if not _has_output(group)]
                # The journal of a lost lane must not be compacted into a record that is deleted.
                await self._record_writer.compact([x for group in groups for x in group.sequences])
            # Some may have got a row, or have ended, while others were given.
            groups = [group for group in self._candidates() if group in groups]
            if groups and self._is_leading():
                await self._give(groups, target)

    def _is_stranded(self) -> bool:
        """Whether the shard has had no worker for so long that it may not have one soon."""
        now = time.monotonic()
        if self._engine.lanes:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        return self._alone_since is not None and now - self._alone_since >= STRANDED_S

    def _candidates(self) -> list[Group]:
        """Requests that wait as a whole, in the order of the queue. With output they move only if
        this shard has no worker: here they may find their cached tokens."""
        may_have_output = not self._engine.lanes
        found: dict[Group, None] = {}
        for sequence in self._engine.waiting.first(4 * _BATCH):
            group = sequence.group
            if (
                group not in found
                and all(map(_waits, group.sequences))
                and (may_have_output or not _has_output(group))
            ):
                found[group] = None
        return list(found)

    def _fitting(self, groups: list[Group], count: int, load: ShardLoad) -> list[Group]:
        """The first of these that can start in a shard with this load: others would wait there,
        too, and be given back. Without a lane here all may wait there."""
        num_rows, num_free_tokens = load.num_free_rows, load.num_free_tokens
        found: list[Group] = []
        for group in groups:
            num_tokens = max(len(sequence.token_ids) for sequence in group.sequences)
            has_room = num_tokens <= num_free_tokens and _num_rows(group) <= num_rows
            if len(found) < count and (has_room or not self._engine.lanes):
                found.append(group)
                num_free_tokens -= num_tokens
                num_rows -= _num_rows(group)
        return found

    async def _give(self, groups: list[Group], target: int) -> None:
        output_model = self._engine.output_model
        for group in groups:
            self._engine.withdraw(group)
            self.giving[group.key] = group
        try:
            await self._put([Moved(to_record(group)).pack() for group in groups], target)
        except BaseException:
            # Also when the term ends here: the next one continues the live requests only.
            for group in groups:
                del self.giving[group.key]
                self._engine.return_withdrawn(group, output_model)
            raise
        log.info("waiting requests moved", requests=len(groups), shard=self._shard, target=target)
        try:
            if self._claims.is_needed:
                await self._claims.give([group.key for group in groups], target)
        finally:
            # The other shard has them, and claims them, too: their gateways must not wait here.
            self._record_writer.discard(group.record for group in groups)
            for group in groups:
                del self.giving[group.key]
                self._on_given(group, target)
            # Those cancelled meanwhile.
            cancelled = [group for group in groups if group.error is not None]
            packed = [Moved(to_record(group), is_cancelled=True).pack() for group in cancelled]
            await self._stores[target].put_in_inbox(packed)

    async def _put(self, packed: list[bytes], target: int) -> None:
        """Put requests into the inbox of another shard. A call without a reply may still be
        executed, so it is repeated, and the requests do not run here meanwhile; the other shard
        ignores those that it has. Raises StoreUnavailable if it is refused, or after `REPEAT_S`."""
        until = time.monotonic() + REPEAT_S
        may_be_given = False
        while True:
            try:
                await self._stores[target].put_in_inbox(packed)
                return
            except StoreUnavailable as error:
                may_be_given = may_be_given or isinstance(error, NoReply)
                if not may_be_given or time.monotonic() > until:
                    raise
            await sleep_ticks(HEARTBEAT_S)
            while not self._is_leading():
                # Redis has not responded for longer than a lease: nothing runs here, either.
                await sleep_ticks(HEARTBEAT_S)

    # Taking

    async def take(self) -> None:
        """Queue the requests that other shards have given, if there are any others. Raises
        StoreError."""
        if self._membership.map.num_shards == 1:
            return
        async with self._taking:
            while packed := await self._store.read_inbox(_BATCH):
                entries = [moved for one in packed if (moved := _read(one)) is not None]
                if self._claims.is_needed:
                    keys = [one.request.record.key for one in entries if not one.is_cancelled]
                    await self._claims.give(keys, self._shard)
                for moved in entries:
                    await self._take(moved)
                await self._store.trim_inbox(packed)

    async def _take(self, moved: Moved) -> None:
        key = moved.request.record.key
        if moved.is_cancelled:
            if group := self._engine.live.get(key):
                self._engine.cancel(group)
            return
        if key in self._engine.live:
            self._first_ids.pop(key, None)
            return
        await self._record_writer.sync({key})
        # The same ones if Redis is unavailable in between: by them it recognises its own record.
        if key not in self._first_ids:
            num_choices = moved.request.record.num_choices
            self._first_ids[key] = self._engine.sequence_ids.take(num_choices)
        record = replace(moved.request.record, sequence_id=self._first_ids[key])
        # As one that was accepted before: it is not started again if it was cancelled.
        [outcome] = await self._store.record([record], [True])
        if outcome is RecordOutcome.NEW:
            group = from_record(replace(moved.request, record=record), {})
            for sequence in group.outputs:
                sequence.num_recorded = 0
            await self._record_writer.compact(group.outputs)
            self._engine.adopt(group)
            self._on_taken(group)
        del self._first_ids[key]


def _waits(sequence: Sequence) -> bool:
    """Whether a sequence has no lane. A choice that has ended needs none."""
    is_queued = sequence.lane_incarnation is None and not sequence.is_ended
    return is_queued or (sequence.is_finished and sequence.group.error is None)


def _num_rows(group: Group) -> int:
    """The rows that it needs at once: those of all beams, or the first one."""
    return len(group.sequences) if group.beams is not None else 1


def _has_output(group: Group) -> bool:
    return any(other.num_output_tokens for other in group.sequences)


def _read(packed: bytes) -> Moved | None:
    """An entry of the inbox; None for one that no version of this service has written."""
    try:
        return Moved.parse(packed)
    except (ValueError, LookupError, TypeError, struct.error) as error:
        # It must not end one leader after the other.
        log.error("an entry of the inbox is not readable", reason=repr(error))
        return None

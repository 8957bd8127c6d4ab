"""The scheduler's door to Redis."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.keys import (
    ENDED,
    LEADERSHIP,
    POOLS,
    PoolKeys,
    output_key,
    request_keys,
    request_pattern,
)
from scheduler_svc.store.leadership import Leader, Leadership, Lease, Renewal
from scheduler_svc.store.packing import mapping, pack_queries, pack_u32s, unpack_matches
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.requests import (
    Ending,
    OutputRun,
    Recorded,
    RequestKey,
    RequestRecord,
    StoredRequest,
    pack_live,
    pack_record,
    unpack_live,
    unpack_request,
)
from scheduler_svc.store.scripts import Script
from scheduler_svc.store.types import PrefixMatch
from scheduler_svc.store.wire import Argument

FINISHED_MAX_BYTES = 256 << 20
_TIMEOUT_S = 5.0
# Behind a slow call of the store's, a renewal would come too late.
_LEASE_TIMEOUT_S = 1.0
_SCANNED_PER_CALL = 2000
# So that no call holds up the others for long.
_REQUESTS_PER_CALL = 250
_BYTES_PER_CALL = 1 << 20


class Store:
    """Everything the scheduler keeps in Redis.

    Every method raises StoreUnavailable; every writing one StaleEpoch once another leader is up,
    and LeadLost without a leadership or where Redis has lost it.
    """

    def __init__(self, connection: Connection, lease_connection: Connection) -> None:
        self._connection = connection
        self._lease_connection = lease_connection
        self._lease = Lease(lease_connection)

    @property
    def leadership(self) -> Leadership:
        """The one taken last and not released, be it lost since. LeadLost if there is none."""
        return self._lease.held

    @property
    def num_calls(self) -> int:
        """Calls of Redis so far."""
        return self._connection.num_calls

    @property
    def waited_s(self) -> float:
        """Seconds that all of these calls have taken."""
        return self._connection.waited_s

    @classmethod
    def at(cls, url: str) -> Self:
        """Connects with the first call, and leads nobody yet. `unix:///path`, `redis://` or
        `rediss://`; ValueError for anything else."""
        return cls(Connection.to(url, _TIMEOUT_S), Connection.to(url, _LEASE_TIMEOUT_S))

    @classmethod
    async def connect(cls, url: str) -> Self:
        """As `at`, but connects at once."""
        store = cls.at(url)
        try:
            await store._connection.execute("PING")
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Does not release the lead."""
        await self._lease_connection.close()
        await self._connection.close()

    async def leader(self) -> Leader | None:
        """Who is stored as the leader, whoever asks; None where nobody ever led."""
        return await self._lease.leader()

    async def take_lead(self, address: str, lease_ms: int) -> Leadership | None:
        """Takes the lead if it was released, not renewed for `lease_ms` or never taken; None
        where another leader has it. From then on every former leader's calls are refused.

        `address` is where others find the leader.
        """
        return await self._lease.take(address, lease_ms)

    async def retake_lead(self, address: str) -> Leadership:
        """For a leader whose entry was lost or may have been: a higher epoch. Pools got before
        are stale; get and open them again. StaleEpoch, and no effect, where another leads."""
        return await self._lease.retake(address)

    async def renew(self) -> Renewal:
        """Starts the lease anew. StaleEpoch where another leads, LeadLost where the entry is gone
        or has a lower epoch."""
        return await self._lease.renew()

    async def release_lead(self) -> None:
        """Lets others take the lead at once; no effect where it is not ours. Write nothing more."""
        await self._lease.release()

    def pool(self, incarnation: int, num_blocks: int, enable_prefix_caching: bool = True) -> Pool:
        """The pool of a worker's life, under the present leadership; open it before use."""
        return Pool(
            self._connection, self.leadership, incarnation, num_blocks, enable_prefix_caching
        )

    async def match_pools(
        self, pools: Sequence[Pool], queries: Sequence[Sequence[bytes]]
    ) -> list[list[PrefixMatch]]:
        """What `Pool.match` says, of each pool, in one round trip."""
        if not queries:
            return [[] for _ in pools]
        packed = pack_queries(queries)
        calls = [
            (PoolKeys(pool.incarnation).blocks, packed)
            for pool in pools
            if pool.enable_prefix_caching
        ]
        replies = iter(await self._connection.run_each(scripts.MATCH, calls) if calls else ())
        return [
            unpack_matches(next(replies))
            if pool.enable_prefix_caching
            else [PrefixMatch(num_hits=0, num_free_hits=0) for _ in queries]
            for pool in pools
        ]

    async def pools(self) -> frozenset[int]:
        """Incarnations of all pools that were opened and not dropped."""
        return frozenset(
            int(member) for member in await self._connection.execute("SMEMBERS", POOLS)
        )

    async def sweep(self, keep: Collection[int]) -> frozenset[int]:
        """Drops all pools but those to keep; returns the dropped ones."""
        lost = await self.pools() - frozenset(keep)
        for incarnation in lost:
            await self.pool(incarnation, num_blocks=0).drop()
        return lost

    async def record(
        self, records: Sequence[RequestRecord], again: Sequence[bool]
    ) -> list[Recorded]:
        """Writes live records whose ids are free; `again`: their gateway submits them again.

        Free is an id that is not known, and one whose request was cancelled or has failed, but
        not for the same request `again`. The repeat of a call gives its answers again.
        """
        packed = [
            part
            for record, is_again in zip(records, again, strict=True)
            for part in (pack_record(record), int(is_again))
        ]
        answers = await self._run(scripts.RECORD, [record.key for record in records], *packed)
        return [Recorded(answer) for answer in answers or ()]

    async def fold(self, runs: Sequence[OutputRun]) -> None:
        """Adds output tokens to live records; what is there already has no effect.

        RequestFault for a gap, for output that contradicts what is stored and for a request that
        is not live; then nothing has changed.
        """
        packed = [
            part
            for run in runs
            for part in (run.choice, run.first_index, pack_u32s(run.token_ids), run.logprobs)
        ]
        await self._run(scripts.FOLD, [run.key for run in runs], *packed)

    async def finish(
        self,
        endings: Sequence[Ending],
        ttl_s: int = 600,
        finished_max_bytes: int = FINISHED_MAX_BYTES,
    ) -> None:
        """Ends live records, which then live on for `ttl_s` seconds. The first ending stands.

        Where all ended ones take more than `finished_max_bytes`, the oldest go before their time.
        """
        if not endings:
            return
        leader = self.leadership
        packed = [part for e in endings for part in (e.state.value, e.status, e.num_cached_tokens)]
        await self._connection.run(
            scripts.FINISH,
            (LEADERSHIP, ENDED, *_keys_of([ending.key for ending in endings])),
            (leader.epoch, leader.holder, ttl_s, finished_max_bytes, *packed),
        )

    async def discard(self, records: Sequence[RequestRecord]) -> None:
        """Deletes live records that `record` may have written, but whose requests were not
        accepted. One that was there before under the same id stays."""
        sequence_ids = [record.sequence_id for record in records]
        await self._run(scripts.DISCARD, [record.key for record in records], *sequence_ids)

    async def load(self, key: RequestKey) -> StoredRequest | None:
        """The record of a request, live or finished; None if there is none."""
        record, output = request_keys(key.principal, key.request_id)
        fields, tokens = await self._connection.snapshot(("HGETALL", record), ("HGETALL", output))
        return unpack_request(mapping(fields), mapping(tokens)) if fields else None

    async def load_live(self) -> list[StoredRequest]:
        """All live records, whoever wrote them, in order of their sequence ids."""
        names = await self._record_names()
        found = []
        for start in range(0, len(names), _REQUESTS_PER_CALL):
            chunk = names[start : start + _REQUESTS_PER_CALL]
            keys = [key for name in chunk for key in (name, output_key(name))]
            found += await self._connection.run(scripts.LIVE, keys, ())
        requests = [unpack_live(packed) for packed in found]
        return sorted(requests, key=lambda request: request.record.sequence_id)

    async def replace_live(self, requests: Sequence[StoredRequest]) -> None:
        """Makes these the live records, with their output, whatever is stored; other live ones
        are deleted. Not atomic: to be repeated until it has returned once."""
        for chunk in _chunks(requests):
            keys = [request.record.key for request, _ in chunk]
            await self._run(scripts.REPLACE, keys, *(packed for _, packed in chunk))
        kept = {request.record.key for request in requests}
        others = [r.record for r in await self.load_live() if r.record.key not in kept]
        for start in range(0, len(others), _REQUESTS_PER_CALL):
            await self.discard(others[start : start + _REQUESTS_PER_CALL])

    async def _record_names(self) -> list[str]:
        """The keys of all records, live or not."""
        names: set[bytes] = set()
        cursor = None
        while cursor != b"0":
            cursor, found = await self._connection.execute(
                "SCAN", cursor or 0, "MATCH", request_pattern(), "COUNT", _SCANNED_PER_CALL
            )
            names.update(found)
        return [name.decode() for name in names]

    async def _run(self, script: Script, requests: Sequence[RequestKey], *args: Argument) -> Any:
        """Runs a script over the records of requests; without any there is nothing to do."""
        if not requests:
            return None
        leader = self.leadership
        return await self._connection.run(
            script, (LEADERSHIP, *_keys_of(requests)), (leader.epoch, leader.holder, *args)
        )


def _keys_of(requests: Sequence[RequestKey]) -> list[str]:
    return [key for r in requests for key in request_keys(r.principal, r.request_id)]


def _chunks(requests: Sequence[StoredRequest]) -> Iterator[list[tuple[StoredRequest, bytes]]]:
    """The requests, with how they travel, in parts of so many and so large."""
    chunk: list[tuple[StoredRequest, bytes]] = []
    num_bytes = 0
    for request in requests:
        packed = pack_live(request)
        chunk.append((request, packed))
        num_bytes += len(packed)
        if len(chunk) == _REQUESTS_PER_CALL or num_bytes >= _BYTES_PER_CALL:
            yield chunk
            chunk, num_bytes = [], 0
    yield chunk

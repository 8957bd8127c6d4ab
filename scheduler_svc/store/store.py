"""The scheduler's entry point to Redis: lease, pools and request records."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.inbox import HEAD_BYTES
from scheduler_svc.store.keys import ClusterKeys, ShardKeys, output_key
from scheduler_svc.store.leadership import Leadership, LeaseStore
from scheduler_svc.store.packing import mapping, pack_queries, pack_u32s, unpack_matches
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.requests import (
    Ending,
    OutputRange,
    RecordOutcome,
    RequestKey,
    RequestRecord,
    StoredRequest,
    pack_live,
    pack_record,
    unpack_live,
    unpack_request,
)
from scheduler_svc.store.resp import Argument
from scheduler_svc.store.retry import RedisRetry
from scheduler_svc.store.scripts import Script
from scheduler_svc.store.types import PrefixMatch

_TIMEOUT_S = 5.0
# Renewals have their own connection: behind a slow call they would be late.
_LEASE_TIMEOUT_S = 1.0
_SCANNED_PER_CALL = 2000
_TENANTS_TTL_S = 7 * 86_400
# Bounds of one call, so that it does not delay other calls for long.
_REQUESTS_PER_CALL = 250
_BYTES_PER_CALL = 1 << 20


class Store:
    """Everything that the leader of one shard keeps in Redis.

    Every method raises StoreUnavailable; every writing one StaleEpoch once another scheduler leads,
    and LeadershipLost without a leadership or if Redis has lost it.
    """

    def __init__(
        self,
        connection: Connection,
        lease_connection: Connection,
        keys: ShardKeys,
        retry: RedisRetry,
    ) -> None:
        # Repeats calls while Redis is unavailable.
        self.retry = retry
        self._connection = connection
        self._lease_connection = lease_connection
        self._keys = keys
        # From an earlier term on, the other connection may be to a server that was replaced: as a
        # replica it refuses writes, but not the reads with which a leader begins.
        self.lease = LeaseStore(lease_connection, keys.leadership, connection.reopen)

    @property
    def leadership(self) -> Leadership:
        """As `LeaseStore.held`."""
        return self.lease.held

    @classmethod
    def at(
        cls,
        url: str,
        password: str | None = None,
        shard: int = 0,
        retry: RedisRetry | None = None,
    ) -> Self:
        """Create a store that connects at the first call. `url` is `unix:///path`, `redis://` or
        `rediss://`, the latter two also with `+sentinel` or `+cluster`; ValueError for anything
        else. `password` is used if the URL has none; `retry` is that of the process; if absent,
        this store logs outages by itself."""
        keys = ShardKeys(shard)
        return cls(
            Connection.to(url, _TIMEOUT_S, password, keys.leadership),
            Connection.to(url, _LEASE_TIMEOUT_S, password, keys.leadership),
            keys,
            retry or RedisRetry(),
        )

    def reopen(self) -> None:
        """Find Redis again by all connections. One of them may still be to a server that was
        replaced, and then has another state than the others."""
        self._connection.reopen()
        self._lease_connection.reopen()

    async def close(self) -> None:
        """Close the connections; does not release the lease."""
        await self._lease_connection.close()
        await self._connection.close()

    def pool(self, incarnation: int, num_blocks: int, enable_prefix_caching: bool = True) -> Pool:
        """The pool of a worker's incarnation under the current leadership; open it before use."""
        return Pool(
            self._connection,
            self._keys,
            self.leadership,
            incarnation,
            num_blocks,
            enable_prefix_caching,
            self.retry,
        )

    async def match_pools(
        self, pools: Sequence[Pool], queries: Sequence[Sequence[bytes]]
    ) -> list[list[PrefixMatch]]:
        """As `Pool.match`, for each pool, in one round trip."""
        if not queries:
            return [[] for _ in pools]
        packed = pack_queries(queries)
        calls = [
            (self._keys.pool(pool.incarnation).blocks, packed)
            for pool in pools
            if pool.enable_prefix_caching
        ]
        replies = iter(
            await self._connection.run_each(scripts.MATCH_PREFIXES, calls) if calls else ()
        )
        return [
            unpack_matches(next(replies))
            if pool.enable_prefix_caching
            else [PrefixMatch(num_hits=0, num_free_hits=0) for _ in queries]
            for pool in pools
        ]

    async def pools(self) -> frozenset[int]:
        """Read the incarnations of all pools that were opened and not dropped."""
        return frozenset(
            int(member) for member in await self._connection.execute("SMEMBERS", self._keys.pools)
        )

    async def write_tenants(self, state: bytes) -> None:
        """Replace what is stored of the tenants; delete it if empty. It is kept for a week."""
        leader = self.leadership
        args = (leader.epoch, leader.holder, _TENANTS_TTL_S, state)
        await self._connection.run(
            scripts.WRITE_TENANTS, (self._keys.leadership, self._keys.tenants), args
        )

    async def write_model(self, fingerprint: bytes) -> None:
        """Note which model the outputs of all live requests are of."""
        leader = self.leadership
        args = (leader.epoch, leader.holder, fingerprint)
        await self._connection.run(scripts.WRITE_MODEL, (self._keys.leadership,), args)

    async def model(self) -> bytes:
        """Read what `write_model` has written last; empty if nothing is. Needs no leadership."""
        return await self._connection.execute("HGET", self._keys.leadership, "model") or b""

    async def write_map(self, packed: bytes) -> int:
        """Replace the map of the cluster, as the leader of shard 0. Returns when Redis got it, in
        milliseconds by its clock."""
        leader = self.leadership
        keys = (self._keys.leadership, ClusterKeys().map)
        args = (leader.epoch, leader.holder, packed)
        return int(await self._connection.run(scripts.WRITE_MAP, keys, args))

    async def tenants(self) -> tuple[bytes, float]:
        """Read what is stored of the tenants, empty if nothing is, and its age in seconds by
        Redis' clock. Needs no leadership."""
        (seconds, micros), (state, written_ms) = await self._connection.snapshot(
            ("TIME",), ("HMGET", self._keys.tenants, "state", "written_ms")
        )
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        # The clock may have been set back.
        return state or b"", max(0, now_ms - int(written_ms or now_ms)) / 1000

    async def record(
        self, records: Sequence[RequestRecord], are_resubmissions: Sequence[bool]
    ) -> list[RecordOutcome]:
        """Write live records whose ids are free.

        An id is free if it is unknown, or if its request was cancelled or failed and this is not
        a resubmission of the same one. A repeated call returns the same results.
        """
        packed = [
            part
            for record, is_resubmission in zip(records, are_resubmissions, strict=True)
            for part in (pack_record(record), int(is_resubmission))
        ]
        keys = [record.key for record in records]
        outcomes = await self._run(scripts.RECORD_REQUESTS, keys, *packed)
        return [RecordOutcome(outcome) for outcome in outcomes or ()]

    async def append_output(self, ranges: Sequence[OutputRange]) -> None:
        """Append output tokens to live records; tokens that are stored already have no effect.

        RecordMismatch for a gap, for output that contradicts the stored one and for a request that
        is not live; then nothing was changed.
        """
        packed = [
            part
            for r in ranges
            for part in (
                r.choice,
                r.first_index,
                pack_u32s(r.token_ids),
                r.logprobs,
                r.prompt_logprobs,
            )
        ]
        await self._run(scripts.APPEND_OUTPUT, [r.key for r in ranges], *packed)

    async def finish(self, endings: Sequence[Ending], ttl_s: int, finished_max_bytes: int) -> None:
        """End live records, which expire after `ttl_s` seconds. A record's first ending is kept.

        If all ended records take more than `finished_max_bytes`, the oldest are deleted early.
        """
        if not endings:
            return
        leader = self.leadership
        packed = [part for e in endings for part in (e.state.value, e.status, e.num_cached_tokens)]
        await self._connection.run(
            scripts.FINISH_RECORDS,
            (
                self._keys.leadership,
                self._keys.ended,
                *self._request_keys([ending.key for ending in endings]),
            ),
            (leader.epoch, leader.holder, ttl_s, finished_max_bytes, *packed),
        )

    async def discard(self, records: Sequence[RequestRecord]) -> None:
        """Delete live records that `record` may have written but whose requests were not accepted.
        An earlier record of the same id stays."""
        sequence_ids = [record.sequence_id for record in records]
        await self._run(scripts.DISCARD_RECORDS, [record.key for record in records], *sequence_ids)

    async def load(self, key: RequestKey) -> StoredRequest | None:
        """Read the record of a request, live or ended; None if there is none."""
        record, output = self._keys.request(key.principal, key.request_id)
        fields, tokens = await self._connection.snapshot(("HGETALL", record), ("HGETALL", output))
        return unpack_request(mapping(fields), mapping(tokens)) if fields else None

    async def exists(self, key: RequestKey) -> bool:
        """Whether there is a record of the request, live or ended."""
        record, _ = self._keys.request(key.principal, key.request_id)
        return bool(await self._connection.execute("EXISTS", record))

    async def stored_requests(self) -> list[RequestKey]:
        """Read the keys of all requests with a record, live or ended."""
        return [RequestKey(*self._keys.request_of(name)) for name in await self._record_names()]

    async def put_in_inbox(self, packed: Sequence[bytes]) -> None:
        """Give requests to this shard, packed as `Moved`. Needs no leadership: another shard's
        leader calls it."""
        if packed:
            await self._connection.execute("RPUSH", self._keys.inbox, *packed)

    async def read_inbox(self, count: int) -> list[bytes]:
        """Read the oldest requests that other shards have given to this one."""
        found: list[bytes] = await self._connection.execute(
            "LRANGE", self._keys.inbox, 0, count - 1
        )
        return found

    async def trim_inbox(self, packed: Sequence[bytes]) -> None:
        """Remove the oldest requests of the inbox, which are recorded. Repeating it is harmless."""
        leader, heads = self.leadership, [entry[:HEAD_BYTES] for entry in packed]
        keys = (self._keys.leadership, self._keys.inbox)
        args: list[Argument] = [leader.epoch, leader.holder, HEAD_BYTES, *heads]
        await self._connection.run(scripts.TRIM_INBOX, keys, args)

    async def load_live(self) -> list[StoredRequest]:
        """Read all live records, of any leader, in order of their sequence ids."""
        names = await self._record_names()
        found = []
        for start in range(0, len(names), _REQUESTS_PER_CALL):
            chunk = names[start : start + _REQUESTS_PER_CALL]
            keys = [key for name in chunk for key in (name, output_key(name))]
            found += await self._connection.run(scripts.LIST_LIVE_RECORDS, keys, ())
        requests = [unpack_live(packed) for packed in found]
        return sorted(requests, key=lambda request: request.record.sequence_id)

    async def replace_live(self, requests: Sequence[StoredRequest]) -> None:
        """Overwrite the live records and their output with these; delete all other live records.
        Not atomic: repeat it until it returns."""
        for chunk in _chunks(requests):
            keys = [request.record.key for request, _ in chunk]
            await self._run(scripts.REPLACE_RECORDS, keys, *(packed for _, packed in chunk))
        kept = {request.record.key for request in requests}
        surplus = [r.record for r in await self.load_live() if r.record.key not in kept]
        for start in range(0, len(surplus), _REQUESTS_PER_CALL):
            await self.discard(surplus[start : start + _REQUESTS_PER_CALL])

    async def _record_names(self) -> list[str]:
        """Read the keys of all records, live or ended."""
        names: set[bytes] = set()
        cursor, opened = b"0", 0
        while True:
            # Any node responds to SCAN alone, also one without the slot, or with a part of it.
            _, (cursor, found) = await self._connection.snapshot(
                ("EXISTS", self._keys.absent),
                ("SCAN", cursor, "MATCH", self._keys.request_pattern, "COUNT", _SCANNED_PER_CALL),
            )
            if opened and opened != self._connection.num_opened:
                # The cursor was another server's.
                names, cursor, opened = set(), b"0", 0
                continue
            opened = self._connection.num_opened
            names.update(found)
            if cursor == b"0":
                return [name.decode() for name in names]

    async def _run(self, script: Script, requests: Sequence[RequestKey], *args: Argument) -> Any:
        """Run a script over the records of requests; do nothing without any."""
        if not requests:
            return None
        leader = self.leadership
        return await self._connection.run(
            script,
            (self._keys.leadership, *self._request_keys(requests)),
            (leader.epoch, leader.holder, *args),
        )

    def _request_keys(self, requests: Sequence[RequestKey]) -> list[str]:
        return [key for r in requests for key in self._keys.request(r.principal, r.request_id)]


def _chunks(requests: Sequence[StoredRequest]) -> Iterator[list[tuple[StoredRequest, bytes]]]:
    """Split packed requests by the bounds of one call."""
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

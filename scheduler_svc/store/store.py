"""The scheduler's door to Redis."""

from collections.abc import Collection, Sequence
from typing import Any, Self

from scheduler_svc.store import scripts
from scheduler_svc.store.connection import Argument, Connection
from scheduler_svc.store.keys import (
    LEADERSHIP,
    POOLS,
    PoolKeys,
    request_keys,
    request_pattern,
)
from scheduler_svc.store.leadership import Leadership
from scheduler_svc.store.packing import pack_queries, pack_u32s, unpack_matches
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.requests import (
    Ending,
    OutputRun,
    RequestKey,
    RequestRecord,
    RequestState,
    StoredRequest,
    pack_record,
    unpack_request,
)
from scheduler_svc.store.scripts import Script
from scheduler_svc.store.types import PrefixMatch

_TIMEOUT_S = 5.0
_SCANNED_PER_CALL = 1000
_KEY_FIELDS = ("state", "principal", "request_id")


class Store:
    """Everything the scheduler keeps in Redis.

    Every method raises StoreUnavailable; every writing one StaleEpoch once another leader is up.
    """

    def __init__(self, connection: Connection, leadership: Leadership) -> None:
        self._connection = connection
        self.leadership = leadership

    @property
    def num_calls(self) -> int:
        """Calls of Redis so far."""
        return self._connection.num_calls

    @property
    def waited_s(self) -> float:
        """Seconds that all of these calls have taken."""
        return self._connection.waited_s

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connects and takes the leadership. `unix:///path`, `redis://` or `rediss://`; ValueError
        for anything else."""
        connection = Connection.to(url, _TIMEOUT_S)
        try:
            return cls(connection, await Leadership.take(connection))
        except BaseException:
            await connection.close()
            raise

    async def close(self) -> None:
        await self._connection.close()

    async def confirm(self) -> None:
        """StaleEpoch if the leadership is not ours any more, or lost with Redis' data."""
        leader = self.leadership
        await self._connection.run(scripts.CONFIRM, (LEADERSHIP,), (leader.epoch, leader.holder))

    async def raise_epoch(self) -> Leadership:
        """Takes the leadership anew. Pools got before are stale; get and open them again."""
        self.leadership = await Leadership.take(self._connection)
        return self.leadership

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

    async def record(self, records: Sequence[RequestRecord]) -> list[bool]:
        """Writes live records; False, and no effect, where the id is live already."""
        fields = [field for record in records for field in pack_record(record)]
        answers = await self._run(scripts.RECORD, [record.key for record in records], *fields)
        return [bool(answer) for answer in answers or ()]

    async def fold(self, runs: Sequence[OutputRun]) -> None:
        """Adds output tokens to live records; what is there already has no effect.

        RequestFault for a gap, for tokens that contradict the stored ones and for a request that
        is not live; then nothing has changed.
        """
        packed = [
            part for run in runs for part in (run.choice, run.first_index, pack_u32s(run.token_ids))
        ]
        await self._run(scripts.FOLD, [run.key for run in runs], *packed)

    async def finish(self, endings: Sequence[Ending], ttl_s: int = 600) -> None:
        """Ends live records, which then live on for `ttl_s` seconds. The first ending stands."""
        states = [ending.state.value for ending in endings]
        await self._run(scripts.FINISH, [ending.key for ending in endings], ttl_s, *states)

    async def discard(self, keys: Sequence[RequestKey]) -> None:
        """Deletes live records that this leader wrote but whose requests it did not accept."""
        await self._run(scripts.DISCARD, keys)

    async def load(self, key: RequestKey) -> StoredRequest | None:
        """The record of a request, live or finished; None if there is none."""
        record, output = request_keys(key.principal, key.request_id)
        fields, tokens = await self._connection.snapshot(("HGETALL", record), ("HGETALL", output))
        return unpack_request(fields, tokens) if fields else None

    async def live_requests(self) -> list[RequestKey]:
        """Requests whose records are live, whoever wrote them."""
        live = []
        cursor = None
        while cursor != 0:
            cursor, names = await self._connection.execute(
                "SCAN", cursor or 0, "MATCH", request_pattern(), "COUNT", _SCANNED_PER_CALL
            )
            for name in names:
                fields = await self._connection.execute("HMGET", name, *_KEY_FIELDS)
                state, principal, request_id = fields
                if state == RequestState.LIVE.value.encode():
                    live.append(RequestKey(principal.decode(), request_id.decode()))
        return live

    async def _run(self, script: Script, requests: Sequence[RequestKey], *args: Argument) -> Any:
        """Runs a script over the records of requests; without any there is nothing to do."""
        if not requests:
            return None
        keys = [key for r in requests for key in request_keys(r.principal, r.request_id)]
        leader = self.leadership
        return await self._connection.run(
            script, (LEADERSHIP, *keys), (leader.epoch, leader.holder, *args)
        )

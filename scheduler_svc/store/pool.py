"""One worker's blocks, allocated by scripts in Redis."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scheduler_svc.store import scripts
from scheduler_svc.store.audit import PoolAudit
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.decode_commits import DecodeCommits
from scheduler_svc.store.keys import ShardKeys
from scheduler_svc.store.leadership import Leadership
from scheduler_svc.store.packing import (
    mapping,
    pack_commit,
    pack_queries,
    unpack_journal_entry,
    unpack_matches,
    unpack_reply,
)
from scheduler_svc.store.resp import Argument
from scheduler_svc.store.retry import RedisRetry
from scheduler_svc.store.scripts import Script
from scheduler_svc.store.types import Commit, CommitReply, JournalEntry, PrefixMatch

_RECLAIMED_PER_CALL = 4096


class Pool:
    """The blocks of one incarnation. One commit is outstanding at a time.

    Every method raises StoreUnavailable; every writing one StaleEpoch, or LeadershipLost if the
    stored epoch is lower.
    """

    def __init__(
        self,
        connection: Connection,
        keys: ShardKeys,
        leadership: Leadership,
        incarnation: int,
        num_blocks: int,
        enable_prefix_caching: bool,
        retry: RedisRetry,
    ) -> None:
        self.incarnation = incarnation
        self.num_blocks = num_blocks  # the null block included
        self.enable_prefix_caching = enable_prefix_caching
        self.retry = retry
        self._connection = connection
        self._leadership = leadership
        self._pools_key = keys.pools
        self._keys = keys.pool(incarnation)

    async def open(self, last_finished_step: int, leader_step: int = 0) -> int:
        """Take the pool over, create it if absent, and return the step to start above.

        Removes hashes published for steps that the worker did not finish, frees every held block in
        descending number and removes every sequence; the other hashes and the journal stay. A pool
        whose stored step is below `last_finished_step`, the worker's, or below `leader_step`, the
        leader's last commit, has lost writes: all hashes are removed. One of which Redis has
        evicted a key begins anew.
        PoolFault if the stored pool has another size.
        """
        keys = self._keys
        await self._connection.execute("SADD", self._pools_key, self.incarnation)
        opened = (*keys.blocks, keys.published)
        step = await self._run(
            scripts.OPEN_POOL,
            opened,
            last_finished_step,
            leader_step,
            self.num_blocks,
        )
        while await self._run(scripts.RECLAIM_POOL, opened, _RECLAIMED_PER_CALL):
            pass
        return int(step)

    async def match(self, queries: Sequence[Sequence[bytes]]) -> list[PrefixMatch]:
        """The longest cached prefix of each hash chain: a hint, valid at the time of the call."""
        if not self.enable_prefix_caching or not queries:
            return [PrefixMatch(num_hits=0, num_free_hits=0) for _ in queries]
        return unpack_matches(
            await self._connection.run(
                scripts.MATCH_PREFIXES, self._keys.blocks, pack_queries(queries)
            )
        )

    async def commit(self, commit: Commit) -> CommitReply:
        """Apply one step, the stored step + 1; a repeat of the stored step gets its reply again.

        WrongStep for any other step. PoolFault if there are too few free blocks to take, if token
        ranges have gaps or overlaps, if their sequence is unknown or an added one is known, for
        changes of blocks without references, and if Redis has evicted a key. A call that raises has
        changed nothing.
        """
        if not self.enable_prefix_caching:
            commit = _without_hashes(commit)
        packed = await self._run(scripts.COMMIT, self._keys.all, commit.step, *pack_commit(commit))
        return unpack_reply(commit, packed)

    def decode_commits(
        self,
        sequence_ids: Sequence[int],
        first_indices: Sequence[int],
        on_end: Callable[[CommitReply | None], None],
    ) -> DecodeCommits:
        """Commits of consecutive steps in which these sequences gain one token each, from these
        indices of their outputs on; `on_end` is called for each of them."""
        return DecodeCommits(
            self._connection, self._leadership, self._keys, sequence_ids, first_indices, on_end
        )

    async def reset_prefix_cache(self) -> int:
        """Remove every hash; return their number. References and the free order stay."""
        keys = self._keys
        return int(await self._run(scripts.RESET_HASHES, (keys.state, keys.hashes, keys.index)))

    async def block_map(self) -> bytes:
        """Read one byte per block: 0 the null block, 1 free, 2 free with a hash, 3 held.

        Empty if the pool does not exist. Far cheaper than an audit, without its checks.
        """
        keys = self._keys
        kinds = await self._connection.run(
            scripts.BLOCK_MAP, (keys.state, keys.references, keys.hashes), ()
        )
        return bytes(kinds)

    async def journal(self) -> list[JournalEntry]:
        """Read the journal entries that are not trimmed, in order of their steps."""
        entries = await self._connection.execute("XRANGE", self._keys.journal, "-", "+")
        return [unpack_journal_entry(entry_id, mapping(fields)) for entry_id, fields in entries]

    async def trim_journal(self, through_step: int) -> None:
        """Delete the journal entries up to and including a step, once they are compacted."""
        keys = self._keys
        await self._run(scripts.TRIM_JOURNAL, (keys.state, keys.journal), through_step + 1)

    async def audit(self) -> PoolAudit:
        """Read and check a snapshot of the pool's blocks. PoolFault if they are inconsistent."""
        keys = self._keys
        state, free, references, hashes, index = await self._connection.snapshot(
            ("HGETALL", keys.state),
            ("ZRANGE", keys.free, 0, -1, "WITHSCORES"),
            ("GET", keys.references),
            ("HGETALL", keys.hashes),
            ("HGETALL", keys.index),
        )
        audit = PoolAudit.read(
            mapping(state), free, references or b"", mapping(hashes), mapping(index)
        )
        audit.check()
        return audit

    async def detach(self) -> float:
        """Note that the pool has no lane; return since when, in seconds by Redis' clock. An earlier
        leader may have noted it; opening the pool clears it."""
        return int(await self._run(scripts.DETACH_POOL, (self._keys.state,))) / 1000

    async def drop(self) -> None:
        """Delete the pool with all its keys."""
        await self._run(scripts.DROP_POOL, self._keys.all)
        await self._connection.execute("SREM", self._pools_key, self.incarnation)

    async def _run(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        leader = self._leadership
        return await self._connection.run(script, keys, (leader.epoch, leader.holder, *args))


def _without_hashes(commit: Commit) -> Commit:
    """Drop publications and fills. The commit then omits admissions that expect hits."""
    if not (commit.publications or commit.admissions):
        return commit
    admissions = tuple(replace(admission, fill_hashes=()) for admission in commit.admissions)
    return replace(commit, publications=(), admissions=admissions)

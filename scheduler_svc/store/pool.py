"""One worker's blocks, allocated by scripts in Redis."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scheduler_svc.store import scripts
from scheduler_svc.store.audit import PoolAudit
from scheduler_svc.store.connection import Connection
from scheduler_svc.store.journal import JournalEntry, unpack_entry
from scheduler_svc.store.keys import POOLS, PoolKeys
from scheduler_svc.store.leadership import Leadership
from scheduler_svc.store.packing import (
    mapping,
    pack_commit,
    pack_queries,
    unpack_matches,
    unpack_reply,
)
from scheduler_svc.store.scripts import Script
from scheduler_svc.store.types import Commit, CommitReply, PrefixMatch
from scheduler_svc.store.wire import Argument

_RECLAIMED_PER_CALL = 4096


class Pool:
    """The blocks of one incarnation. One commit is outstanding at a time.

    Every method raises StoreUnavailable; every writing one StaleEpoch, or LeadLost
    where the stored epoch is a former leader's.
    """

    def __init__(
        self,
        connection: Connection,
        leadership: Leadership,
        incarnation: int,
        num_blocks: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.incarnation = incarnation
        self.num_blocks = num_blocks  # the null block included
        self.enable_prefix_caching = enable_prefix_caching
        self._connection = connection
        self._leadership = leadership
        self._keys = PoolKeys(incarnation)
        self._all_keys = self._keys.all

    async def open(self, last_finished_step: int, known_step: int = 0) -> int:
        """Takes the pool over, creates it if absent, and returns the step to start above.

        Removes hashes published for steps the worker did not finish, frees every held block in
        descending number and forgets every sequence; the other hashes and the journal stay.
        A pool whose stored step is below `last_finished_step`, the worker's, or below
        `known_step`, the last one that the leader had committed, has lost writes: all hashes go.
        PoolFault if the stored pool has another size.
        """
        keys = self._keys
        await self._connection.execute("SADD", POOLS, self.incarnation)
        step = await self._run(
            scripts.OPEN,
            (*keys.blocks, keys.published),
            last_finished_step,
            known_step,
            self.num_blocks,
        )
        while await self._run(scripts.RECLAIM, keys.blocks, _RECLAIMED_PER_CALL):
            pass
        return int(step)

    async def match(self, queries: Sequence[Sequence[bytes]]) -> list[PrefixMatch]:
        """The longest cached prefix of each hash chain: a hint, true at the time of the call."""
        if not self.enable_prefix_caching or not queries:
            return [PrefixMatch(num_hits=0, num_free_hits=0) for _ in queries]
        return unpack_matches(
            await self._connection.run(scripts.MATCH, self._keys.blocks, pack_queries(queries))
        )

    async def commit(self, commit: Commit) -> CommitReply:
        """Applies one step: stored step + 1; a repeat of the stored step gets its reply again.

        WrongStep for any other step; PoolFault for takes that do not fit, gaps and overlaps in
        runs, runs of sequences that are not there, ones that join and are, and for blocks that
        nobody holds. A call that raises has changed nothing.
        """
        if not self.enable_prefix_caching:
            commit = _without_hashes(commit)
        packed = await self._run(scripts.COMMIT, self._all_keys, commit.step, *pack_commit(commit))
        return unpack_reply(commit, packed)

    async def reset_prefix_cache(self) -> int:
        """Removes every hash, and returns how many there were.

        Held blocks keep their references, free ones their places.
        """
        keys = self._keys
        return int(await self._run(scripts.RESET, (keys.state, keys.hashes, keys.index)))

    async def block_map(self) -> bytes:
        """A byte per block: 0 the null block, 1 free, 2 free with a hash, 3 held.

        Empty where there is no pool. Far cheaper than an audit, and checks nothing.
        """
        keys = self._keys
        kinds = await self._connection.run(
            scripts.BLOCK_MAP, (keys.state, keys.references, keys.hashes), ()
        )
        return bytes(kinds)

    async def journal(self) -> list[JournalEntry]:
        """What was journaled and not trimmed, in order of the steps."""
        entries = await self._connection.execute("XRANGE", self._keys.journal, "-", "+")
        return [unpack_entry(entry_id, mapping(fields)) for entry_id, fields in entries]

    async def trim_journal(self, through_step: int) -> None:
        """Drops the journal entries up to and including a step, once they are folded."""
        keys = self._keys
        await self._run(scripts.TRIM, (keys.state, keys.journal), through_step + 1)

    async def audit(self) -> PoolAudit:
        """The pool's blocks at this moment. PoolFault where they contradict each other."""
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

    async def drop(self) -> None:
        """Deletes the pool with everything it holds."""
        await self._run(scripts.DROP, self._keys.all)
        await self._connection.execute("SREM", POOLS, self.incarnation)

    async def _run(self, script: Script, keys: Sequence[str], *args: Argument) -> Any:
        leader = self._leadership
        return await self._connection.run(script, keys, (leader.epoch, leader.holder, *args))


def _without_hashes(commit: Commit) -> Commit:
    """An admission that counts on hits is then left out: there are none."""
    admissions = tuple(replace(admission, fill_hashes=()) for admission in commit.admissions)
    return replace(commit, publications=(), admissions=admissions)

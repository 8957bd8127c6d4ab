"""One worker's blocks, allocated by scripts in Redis."""

from collections.abc import Sequence

from scheduler_svc.store.types import Commit, CommitReply, PrefixMatch


class Pool:
    """The blocks of one incarnation. One commit is outstanding at a time.

    Every method raises StoreUnavailable; every writing one StaleEpoch.
    """

    incarnation: int
    num_blocks: int  # the null block included

    async def open(self, last_finished_step: int) -> int:
        """Takes the pool over, creates it if absent, and returns the step to start above.

        Removes hashes published for steps the worker did not finish, frees every held block and
        forgets every sequence; the other hashes stay. PoolFault if the stored pool has another
        size.
        """
        raise NotImplementedError

    async def match(self, queries: Sequence[Sequence[bytes]]) -> list[PrefixMatch]:
        """The longest cached prefix of each hash chain: a hint, true at the time of the call."""
        raise NotImplementedError

    async def commit(self, commit: Commit) -> CommitReply:
        """Applies one step: stored step + 1; a repeat of the stored step gets its reply again.

        WrongStep for any other step; PoolFault for appends that do not fit, gaps and overlaps in
        runs, unknown sequences and blocks nobody holds. A call that raises has changed nothing.
        """
        raise NotImplementedError

    async def trim_journal(self, through_step: int) -> None:
        """Drops the journal entries up to and including a step, once they are folded."""
        raise NotImplementedError

    async def drop(self) -> None:
        """Deletes the pool with everything it holds."""
        raise NotImplementedError

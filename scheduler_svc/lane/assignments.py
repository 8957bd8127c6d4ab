"""Sequences assigned to a lane that wait for a row, and the lane's capacity for more."""

from collections.abc import Callable
from itertools import takewhile

from scheduler_svc.core.block_fit import blocks_for
from scheduler_svc.core.placement import LaneBudget
from scheduler_svc.core.request import DEFERRED_TOKENS
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.view import Limits
from scheduler_svc.lane.pool_client import PoolClient
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.store.hashing import num_matchable_blocks
from scheduler_svc.store.types import PrefixMatch

_UNKNOWN = PrefixMatch(num_hits=0, num_free_hits=0)


class Assignments:
    """Matches assigned sequences with the lane's prefix cache, and requeues those that ended."""

    def __init__(
        self,
        table: SequenceTable,
        pool: PoolClient,
        limits: Limits,
        draining: bool,
        requeue: Callable[[list[Sequence]], None],
    ) -> None:
        # While draining nothing is admitted: all assigned sequences are requeued.
        self.draining = draining
        # Those that the step in progress admits; they stay assigned until then.
        self.admitting: list[Sequence] = []
        self._table = table
        self._pool = pool
        self._limits = limits
        self._requeue = requeue
        # Cached prefixes of assigned sequences, until the next decision.
        self._matches: dict[Sequence, PrefixMatch] = {}

    @property
    def is_open(self) -> bool:
        """Whether the lane accepts more requests."""
        return not self.draining and self.budget().is_open

    def can_batch_more(self) -> bool:
        """Whether all sequences of the lane have deferred delivery, and it accepts more."""
        table = self._table
        if table.swapped or table.awaiting_results:
            return False
        self.requeue_ended()
        sequences = [*table.assigned, *table.rows]
        if not sequences or not self.is_open:
            return False
        return all(
            sequence.group.tokens_per_frame >= DEFERRED_TOKENS
            and not (sequence.is_suspect or sequence.is_ended)
            for sequence in sequences
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits for a row."""
        return not (self._table.assigned or self._matches)

    def budget(self) -> LaneBudget:
        """The lane's remaining capacity, with assigned sequences counted."""
        table, block_size = self._table, self._limits.block_size
        budget = LaneBudget(self._limits, table.num_wanted_rows, self._pool.num_free_blocks)
        for row in table.rows:
            # Decodes have one token to compute, and are not queued.
            if (num_tokens := row.num_tokens - row.num_computed_tokens) > 1:
                budget.queue(num_tokens)
        for sequence in table.assigned:
            match = self._matches.get(sequence, _UNKNOWN)
            budget.queue(len(sequence.token_ids) - match.num_hits * block_size)
            budget.num_free_blocks -= blocks_for(len(sequence.token_ids), block_size)
            budget.num_free_blocks += match.num_hits - match.num_free_hits
        return budget

    def add(self, sequence: Sequence, match: PrefixMatch | None) -> None:
        self._table.assign(sequence)
        if match is not None:
            self._matches[sequence] = match

    def recall(self, principal: str) -> list[Sequence]:
        """Remove and return sequences that have not run, if any of them belongs to another
        principal than this one."""
        recalled = [
            sequence
            for sequence in self._table.assigned
            if not (sequence.has_precedence or sequence.is_ended or sequence in self.admitting)
        ]
        if all(sequence.group.key.principal == principal for sequence in recalled):
            return []
        for sequence in recalled:
            self._table.assigned.remove(sequence)
            self._matches.pop(sequence, None)
        return recalled

    def matchable(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks that may be cache hits."""
        if not self._pool.pool.enable_prefix_caching:
            return []
        block_size = self._limits.block_size
        num_blocks = num_matchable_blocks(len(sequence.token_ids), block_size)
        return sequence.hashes()[: min(num_blocks, sequence.num_cacheable_tokens // block_size)]

    def requeue_ended(self) -> None:
        """Requeue assigned sequences that have ended; all of them while draining."""
        assigned = self._table.assigned
        if self.draining or any(sequence.is_ended for sequence in assigned):
            kept = [] if self.draining else [other for other in assigned if not other.is_ended]
            requeued = [sequence for sequence in assigned if sequence not in kept]
            self._table.assigned = kept
            for sequence in requeued:
                self._matches.pop(sequence, None)
            self._requeue(requeued)

    async def candidates(self) -> list[tuple[Sequence, PrefixMatch]]:
        """Assigned sequences that may be admitted now, with their cached prefixes."""
        table = self._table
        if self.is_empty:
            return []
        self.requeue_ended()
        # Swapped and preempted sequences precede the assigned ones.
        if table.swapped or table.is_preempting or len(table.rows) >= self._limits.max_num_seqs:
            return []
        unknown = [other for other in table.assigned if other not in self._matches]
        if unknown:
            queries = [self.matchable(sequence) for sequence in unknown]
            matches = await self._pool.match(queries)
            self._matches.update(zip(unknown, matches, strict=True))
            self.requeue_ended()
        matched, self._matches = self._matches, {}
        # Sequences assigned during the call have no match yet and must not be overtaken.
        known = takewhile(lambda other: other in matched, table.assigned)
        return [(other, matched[other]) for other in known]

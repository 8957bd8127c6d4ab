"""One worker's lane, as the rest of the scheduler uses it."""

from scheduler_svc.core.block_fit import blocks_for
from scheduler_svc.core.crashes import CrashHistory
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.core.view import Limits
from scheduler_svc.lane.assignments import Assignments
from scheduler_svc.lane.loop import LaneLoop
from scheduler_svc.lane.options import LaneHooks, LaneOptions
from scheduler_svc.lane.pool_client import PoolClient
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.lane.worker_stream import LaneLost, WorkerInfo, WorkerSilent, WorkerStream
from scheduler_svc.store.pool import Pool
from scheduler_svc.store.types import PrefixMatch


class Lane:
    """The sequences of one worker, and the loop that steps them.

    Every sequence is released from its row in the same way: the next commit returns its blocks, the
    next plan releases the row. Only its destination differs.
    """

    def __init__(
        self,
        worker: WorkerInfo,
        address: str,
        stream: WorkerStream,
        pool: Pool,
        epoch: int,
        first_step: int,
        limits: Limits,
        options: LaneOptions,
        hooks: LaneHooks,
    ) -> None:
        self.worker = worker
        self.address = address
        self.limits = limits
        self._num_lookahead_tokens = worker.num_speculative_tokens
        self.stats = LaneStats()
        self.table = SequenceTable(limits.max_num_seqs, worker.num_host_blocks, address)
        self.rows = self.table.rows
        self._pool = PoolClient(pool, first_step, self.rows, self.stats)
        self.assignments = Assignments(
            self.table, self._pool, limits, worker.draining, hooks.requeue
        )
        self._loop = LaneLoop(
            worker, stream, epoch, limits, self.table, self._pool, self.assignments, options, hooks
        )

    @property
    def assigned(self) -> list[Sequence]:
        return self.table.assigned

    @property
    def num_swapped(self) -> int:
        return self.table.num_swapped

    @property
    def num_sequences(self) -> int:
        """Sequences that are assigned, have a row, or are swapped."""
        return len(self.rows) + len(self.assigned) + self.num_swapped

    @property
    def is_empty(self) -> bool:
        return self.table.is_empty

    @property
    def draining(self) -> bool:
        return self.assignments.draining

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_free_tokens(self) -> int:
        """The longest new sequence for which it has blocks now, besides those that are assigned."""
        size = self.limits.block_size
        assigned = sum(blocks_for(len(sequence.token_ids), size) for sequence in self.assigned)
        return max(0, self.num_free_blocks - assigned - self.limits.watermark) * size

    @property
    def num_admissible_blocks(self) -> int:
        """Blocks available to new requests when nothing runs."""
        return self.worker.num_blocks - 1 - self.limits.watermark

    @property
    def pool(self) -> Pool:
        return self._pool.pool

    @property
    def last_step(self) -> int:
        """The last step committed to the pool."""
        return self._pool.last_step

    @property
    def uncompacted(self) -> list[Sequence]:
        """Sequences that left the lane, with tokens that may be in this pool's journal only."""
        return self._loop.compaction.uncompacted

    def assign(self, sequence: Sequence, match: PrefixMatch | None = None) -> None:
        """Assign a sequence to the lane; `match` is its cached prefix there, if known."""
        if self.is_empty:
            self._loop.batch_window.open()
        self.assignments.add(sequence, match)
        sequence.set_lane(self.worker.incarnation, self._num_lookahead_tokens)
        self.wake()

    def recall(self, principal: str) -> list[Sequence]:
        """Take back sequences that wait for a row, if others than this principal's are among them.
        The step in progress keeps those that it admits."""
        return self.assignments.recall(principal)

    async def run(self) -> None:
        """Step until the lane is drained or halted. Raises LaneLost or a StoreError."""
        await self._loop.run()

    def wake(self) -> None:
        """Run the loop: there may be work, or ended sequences."""
        self._loop.wake()

    def stream_changed(self) -> None:
        """A result has arrived, or the stream is lost."""
        self._loop.stream_changed()

    def drain(self) -> None:
        """Accept no new requests; `run` returns once the last one is released."""
        if not self.draining:
            self.assignments.draining = True
            self.wake()

    def halt(self) -> None:
        """Send no more plans; `run` returns once those in flight are complete and delivered."""
        self._loop.halt()

    def mark_suspects(self, error: LaneLost, crashes: CrashHistory) -> None:
        """Mark the sequences in flight as suspects after the worker is lost. `crashes` are those of
        all workers."""
        if not self.draining:
            is_dead = not isinstance(error, WorkerSilent)
            self._loop.quarantine.worker_lost(self._loop.in_flight.sequences, is_dead, crashes)

    async def check_integrity(self) -> None:
        """PoolFault unless the pool's references equal the lane's."""
        await self._pool.check()

    async def reset_prefix_cache(self) -> int:
        """Remove all block hashes; return the number of blocks that had one."""
        return await self._pool.reset_prefix_cache()

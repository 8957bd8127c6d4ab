"""Admits sequences to rows in a step, and assigns their blocks."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.core.view import Admitted, StepDecision, SwappedIn
from scheduler_svc.lane.sequence_table import SequenceTable, SwappedGroup
from scheduler_svc.lane.steps.beams import StepBeams
from scheduler_svc.lane.steps.step_builder import StepBuilder
from scheduler_svc.store.types import Admission, CommitReply


class StepAdmission:
    """Requests blocks before the commit and assigns them after it, in the same order: appends,
    swapped groups, forks, then admissions. Blocks of beams are appended."""

    def __init__(
        self,
        builder: StepBuilder,
        table: SequenceTable,
        decision: StepDecision[Sequence],
        beams: StepBeams,
        stats: LaneStats,
    ) -> None:
        self._builder = builder
        self._beams = beams
        self._table = table
        self._decision = decision
        self._stats = stats

    # Before the commit

    def share_prefixes(self) -> None:
        """Share the full blocks before the prompt's last token with the forks."""
        for _, sibling in self._decision.forked:
            self._builder.share(_prompt_blocks(sibling)[: self._num_whole_blocks(sibling)])

    def taken_references(self) -> list[int]:
        """Per block to take, its number of references: siblings share blocks swapped in."""
        references = [1] * sum(count for _, count in self._decision.appends)
        for swap in self._decision.swapped_in:
            tables = Counter(b for other in swap.group.sequences for b in other.block_ids)
            references += tables.values()
            references += [1] * sum(swap.num_new_blocks)
        return references + [1] * len(self._decision.forked)

    def admissions(self) -> list[Admission]:
        return [self._admission(entry) for entry in self._decision.admitted]

    def _admission(self, entry: Admitted[Sequence]) -> Admission:
        sequence, num_hits = entry.sequence, entry.num_hits
        hashes, block_size = self._builder.hashes(sequence), self._builder.block_size
        num_computed = num_hits * block_size + entry.num_scheduled_tokens
        return Admission(
            sequence_id=sequence.sequence_id,
            num_output_tokens=sequence.num_journaled,
            hit_hashes=hashes[:num_hits],
            num_new_blocks=entry.num_new_blocks,
            fill_hashes=hashes[num_hits : num_computed // block_size],
        )

    # After the commit

    def apply(self, reply: CommitReply) -> None:
        taken = iter(reply.taken)
        for sequence, count in self._decision.appends:
            assert sequence.row is not None
            block_ids = list(islice(taken, count))
            self._extend(sequence, block_ids)
            if sequence.copied_block is not None:
                self._builder.plan.copies.add(sequence.copied_block, block_ids[0])
                sequence.copied_block = None
            if not sequence.is_changed:
                self._builder.plan.appended.append((sequence.row, block_ids))
        self._beams.admit()
        for swap in self._decision.swapped_in:
            self._swap_in(swap, taken)
        for _, sibling in self._decision.forked:
            self._fork(sibling, next(taken))
        for entry, table in zip(self._decision.admitted, reply.admitted, strict=True):
            # None: its cache hits have been evicted since the match; it is matched again.
            if table is not None:
                self._admit(entry, list(table))

    def _extend(self, sequence: Sequence, block_ids: list[int]) -> None:
        sequence.block_ids += block_ids
        self._builder.rows.add_references(block_ids)

    def _start(self, sequence: Sequence, num_tokens: int) -> None:
        """Assign a row to a sequence that has its blocks, and run it."""
        # All results of its last row are known.
        sequence.last_published_blocks = []
        self._builder.rows.admit(sequence)
        self._builder.plan.admit(sequence)
        sequence.is_on_worker, sequence.is_changed = True, False
        if num_tokens:
            self._builder.plan.num_scheduled_tokens.append(num_tokens)
            self._builder.compute(sequence, num_tokens)

    def _swap_in(self, swap: SwappedIn[Sequence], taken: Iterator[int]) -> None:
        # A copy, because the block tables change before the group leaves the table.
        swapped = SwappedGroup(list(swap.group.sequences))
        host_blocks = swapped.host_blocks
        moved = dict(zip(host_blocks, islice(taken, len(host_blocks)), strict=True))
        for source, destination in moved.items():
            self._builder.plan.swap_ins.add(source, destination)
        self._table.swap_in(swapped)
        for sequence, num_tokens, num_new in zip(
            swapped.sequences, swap.num_scheduled_tokens, swap.num_new_blocks, strict=True
        ):
            block_ids = [moved[block_id] for block_id in sequence.block_ids]
            sequence.block_ids = []
            self._extend(sequence, block_ids)
            self._extend(sequence, list(islice(taken, num_new)))
            self._table.traced.swap_in(sequence)
            self._start(sequence, num_tokens)

    def _fork(self, sibling: Sequence, block_id: int) -> None:
        blocks, num_whole = _prompt_blocks(sibling), self._num_whole_blocks(sibling)
        position = sibling.num_prompt_tokens - 1
        if position % self._builder.block_size:
            self._builder.plan.copies.add(blocks[num_whole], block_id)
        group = sibling.group
        group.siblings.remove(sibling)
        sibling.block_ids = blocks[:num_whole]
        self._extend(sibling, [block_id])
        sibling.num_computed_tokens = sibling.num_certain_tokens = position
        sibling.num_hit_blocks = sibling.num_published_blocks = num_whole
        sibling.num_cached_tokens = group.sequences[0].num_cached_tokens
        self._table.traced.admit(sibling, position)
        self._start(sibling, 1)

    def _num_whole_blocks(self, sibling: Sequence) -> int:
        """Number of blocks before the one with the prompt's last token."""
        return (sibling.num_prompt_tokens - 1) // self._builder.block_size

    def _admit(self, entry: Admitted[Sequence], table: list[int]) -> None:
        sequence, block_size = entry.sequence, self._builder.block_size
        num_cached = entry.num_hits * block_size
        self._table.assigned.remove(sequence)
        self._extend(sequence, table)
        sequence.num_computed_tokens = sequence.num_certain_tokens = num_cached
        sequence.num_hit_blocks = entry.num_hits
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
        if sequence.is_first and sequence.group.siblings:
            self._table.forking_groups.append(sequence.group)
        if sequence.is_beam:
            self._table.beam_groups[sequence.group] = None
        self._table.traced.admit(sequence, num_cached)
        self._start(sequence, entry.num_scheduled_tokens)
        sequence.num_published_blocks = sequence.num_computed_tokens // block_size
        self._count(sequence, num_cached)
        if (timer := sequence.group.queue_timer) is not None:
            sequence.group.queue_timer = None
            timer.stop()

    def _count(self, sequence: Sequence, num_cached: int) -> None:
        stats, num_tokens = self._stats, len(sequence.token_ids)
        stats.num_queried_tokens += num_tokens
        stats.num_hit_tokens += num_cached
        if sequence.was_lost:
            sequence.was_lost = False
            stats.num_recovered_tokens += num_tokens
            stats.num_recovered_hit_tokens += num_cached


def _prompt_blocks(sibling: Sequence) -> list[int]:
    group = sibling.group
    return group.sequences[0].block_ids if group.pinned_blocks is None else group.pinned_blocks

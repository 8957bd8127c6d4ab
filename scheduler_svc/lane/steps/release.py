"""Releases sequences from their rows and routes them: finished, requeued, or swapped."""

from collections.abc import Iterable, Set

from grpc import StatusCode

from quire.service.errors import failed
from scheduler_svc.core.beams import hold_back, restart_beams
from scheduler_svc.core.block_fit import blocks_for
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.lane.sequence_table import SequenceTable, SwappedGroup
from scheduler_svc.lane.steps.step_builder import StepBuilder


class StepRelease:
    """The releases of one step. All free the row; what follows differs."""

    def __init__(
        self,
        builder: StepBuilder,
        table: SequenceTable,
        stats: LaneStats,
        kept: Set[Sequence],
    ) -> None:
        """Rows that are `kept` are not released when they have ended, but with a later step."""
        self._kept = kept
        self._builder = builder
        self._table = table
        self._stats = stats

    def release_ended(self, failed_rows: Iterable[Sequence]) -> None:
        """Release all ended sequences. `failed_rows` invalidate what they published."""
        self._withdraw(failed_rows)
        for sequence in self._ended_rows():
            self._release_row(sequence)
        self._release_awaiting()
        for swapped in list(self._table.swapped):
            self._release_swapped(swapped)
        for group in list(self._table.forking_groups):
            self._release_forking_group(group)

    # Finished

    def _ended_rows(self) -> list[Sequence]:
        """Rows that need no more tokens; their last tokens may be in flight."""
        return [
            sequence
            for sequence in self._table.rows
            if sequence not in self._kept
            # `is_complete or is_ended` inlined: this runs over all rows in every step.
            and (
                sequence.num_tokens >= sequence.max_num_tokens
                or sequence.end is not None
                or sequence.group.error is not None
            )
        ]

    def _release_row(self, sequence: Sequence) -> None:
        group, block_ids = sequence.group, sequence.block_ids
        if sequence.num_lookahead_tokens and not sequence.is_ended:
            # Its last token is expected, not certain: it may need a row again.
            sequence.has_precedence = True
            if sequence.is_first and group.siblings:
                self.cancel_forks(group)
        if group.siblings and group.error is None and sequence.is_first and not sequence.is_beam:
            if sequence.blocks_are_valid:
                # The prompt's blocks stay for the siblings; nothing writes to them any more.
                num_held = blocks_for(sequence.num_prompt_tokens, self._builder.block_size)
                group.pinned_blocks, block_ids = block_ids[:num_held], block_ids[num_held:]
            else:
                self.cancel_forks(group)
        self._builder.release(sequence, block_ids)
        sequence.reset_blocks()
        # Even if nothing is in flight: `_release_awaiting`, which follows, then finishes it.
        self._table.awaiting_results.append(sequence)

    def _release_awaiting(self) -> None:
        """Release sequences whose last tokens are known and, with this commit, journaled."""
        awaiting, self._table.awaiting_results = self._table.awaiting_results, []
        for sequence in awaiting:
            if sequence.is_ended:
                self._finish(sequence)
            elif sequence.last_step <= self._table.completed_step:
                self._builder.removed.append(sequence.sequence_id)
                self._builder.requeued.append(sequence)
            else:
                self._table.awaiting_results.append(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.is_beam:
            if not sequence.is_first:
                return
            sequence.group.siblings = []
            self._table.beam_groups.pop(sequence.group, None)
        self._builder.removed.append(sequence.sequence_id)
        self._builder.finished.append(sequence)

    def _release_swapped(self, swapped: SwappedGroup) -> None:
        over = [sequence for sequence in swapped.sequences if sequence.is_ended]
        if not over:
            return
        host_blocks = set(swapped.host_blocks)
        swapped.sequences = [sequence for sequence in swapped.sequences if not sequence.is_ended]
        self._table.swap_space.free(host_blocks - set(swapped.host_blocks))
        for sequence in over:
            sequence.reset_blocks()
            self._finish(sequence)
        if not swapped.sequences:
            self._table.swapped.remove(swapped)

    def _release_forking_group(self, group: Group) -> None:
        if group.error is not None:
            if group.beams is None:
                self._builder.finished += group.siblings
            group.siblings = []
        if not group.siblings:
            self._remove_forking_group(group)

    def _remove_forking_group(self, group: Group) -> None:
        if group.pinned_blocks is not None:
            self._builder.return_blocks(group.pinned_blocks)
            group.pinned_blocks = None
        self._table.forking_groups.remove(group)

    # Preempted

    def preempt(self, sequence: Sequence) -> None:
        """Release a row; the sequence is recomputed later. All rows of a search are released."""
        if sequence.is_beam:
            for other in sequence.group.sequences:
                if other.row is not None:
                    self._builder.release(other, other.block_ids)
            self._recompute(sequence)
            return
        self._builder.release(sequence, sequence.block_ids)
        self._recompute(sequence)

    def _recompute(self, sequence: Sequence) -> None:
        if sequence.is_beam:
            self._recompute_beams(sequence.group)
            return
        self._stats.num_preempted_by_recompute += 1
        group = sequence.group
        if sequence.is_first and group in self._table.forking_groups:
            if sequence.num_tokens > sequence.num_prompt_tokens:
                # It may end before it has a row again, and the siblings would wait forever.
                self.cancel_forks(group)
            else:
                self._table.forking_groups.remove(group)
        self._table.traced.preempt(sequence)
        sequence.reset_blocks()
        sequence.has_precedence = True
        self._table.awaiting_results.append(sequence)

    def _recompute_beams(self, group: Group) -> None:
        """Restart a search whose rows are released; once for all of its beams."""
        if group not in self._table.beam_groups:
            return
        del self._table.beam_groups[group]
        self._stats.num_preempted_by_recompute += 1
        if group in self._table.forking_groups:
            self._table.forking_groups.remove(group)
        first = group.sequences[0]
        self._table.traced.preempt(first)
        first.last_step = max(other.last_step for other in group.sequences)
        for other in group.sequences:
            other.reset_blocks()
        restart_beams(group)
        first.has_precedence = True
        self._table.awaiting_results.append(first)

    def exhaust(self, sequence: Sequence, num_usable_blocks: int) -> None:
        """Fail a search that the pool cannot hold, and release the row of one of its beams."""
        width = sequence.group.params.beam_width
        message = (
            f"{width} beams need more than the {num_usable_blocks} blocks of the cache; use "
            "fewer beams or a lower max_tokens, or give the worker a larger cache (`--num-blocks`)"
        )
        sequence.group.fail(failed(StatusCode.FAILED_PRECONDITION, "CACHE_TOO_SMALL", message))
        self._release_row(sequence)

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Release the rows of a whole group and move its blocks to the host."""
        self._stats.num_preempted_by_swap += len(sequences)
        if sequences[0].is_beam:
            hold_back(sequences[0].group)
        device_blocks = list(dict.fromkeys(b for other in sequences for b in other.block_ids))
        host_blocks = self._table.swap_space.allocate(len(device_blocks))
        moved = dict(zip(device_blocks, host_blocks, strict=True))
        for source, destination in moved.items():
            self._builder.plan.swap_outs.add(source, destination)
        for sequence in sequences:
            self._builder.release(sequence, sequence.block_ids)
            # A result in flight may report the row as failed.
            sequence.last_published_blocks = sequence.published_blocks
            sequence.block_ids = [moved[block_id] for block_id in sequence.block_ids]
            sequence.num_hit_blocks = sequence.num_published_blocks = 0
            self._table.traced.swap_out(sequence)
        self._table.swap_out(SwappedGroup(sequences))

    def preempt_all(self) -> None:
        """Preempt all sequences, to be continued on other lanes."""
        for group in list(self._table.forking_groups):
            if group.siblings and group.beams is None:
                self.cancel_forks(group)
        for sequence in list(self._table.rows):
            if sequence.row is not None:
                self.preempt(sequence)
        for swapped in list(self._table.swapped):
            self.discard_swapped(swapped)

    def discard_swapped(self, swapped: SwappedGroup) -> None:
        """Free a swapped group's host blocks; its sequences are recomputed later."""
        self._table.swap_space.free(swapped.host_blocks)
        self._table.swapped.remove(swapped)
        for sequence in swapped.sequences:
            self._recompute(sequence)

    def cancel_forks(self, group: Group) -> None:
        """Requeue the siblings; they are admitted like new sequences, using the prefix cache."""
        for sibling in group.siblings:
            sibling.has_precedence = True
        self._builder.requeued += group.siblings
        group.siblings = []
        self._remove_forking_group(group)

    # Failed rows

    def _withdraw(self, failed_rows: Iterable[Sequence]) -> None:
        """Withdraw hashes that failed rows published, and preempt rows that share those blocks."""
        invalid = {block_id for sequence in failed_rows for block_id in sequence.published_blocks}
        if not invalid:
            return
        sharers = self._sharers(invalid)
        for sequence in sharers:
            sequence.blocks_are_valid = False
        for sequence in sharers:
            if not sequence.is_ended and sequence.row is not None:
                self.preempt(sequence)
        self._builder.withdrawals = sorted(invalid)
        for group in list(self._table.forking_groups):
            if group.pinned_blocks is not None and not invalid.isdisjoint(group.pinned_blocks):
                self.cancel_forks(group)
        # Swapped groups may hold copies of invalid blocks: their device blocks are unknown now.
        for swapped in list(self._table.swapped):
            self.discard_swapped(swapped)

    def _sharers(self, invalid: set[int]) -> list[Sequence]:
        """Rows with invalid blocks. Blocks that they published are invalid, too, and are added."""
        sharers: list[Sequence] = []
        remaining = list(self._table.rows)
        while found := [row for row in remaining if not invalid.isdisjoint(row.block_ids)]:
            sharers += found
            remaining = [row for row in remaining if invalid.isdisjoint(row.block_ids)]
            invalid.update(block_id for other in found for block_id in other.published_blocks)
        return sharers

"""Who leaves a row, or the lane, in a step, and where they go."""

from collections.abc import Iterable

from scheduler_svc.core.policy import blocks_for
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.lanes.draft import Draft
from scheduler_svc.lanes.roster import Roster, SwappedGroup


class Leaving:
    """One verb, leave the row; what follows differs."""

    def __init__(self, draft: Draft, roster: Roster, stats: LaneStats) -> None:
        self._draft = draft
        self._roster = roster
        self._stats = stats

    def settle(self, failed: Iterable[Sequence]) -> None:
        """Has everybody leave who is over. `failed` rows spoil the blocks that they published."""
        self._withdraw(failed)
        for sequence in self._done():
            self._leave(sequence)
        self._settle_late()
        for swapped in list(self._roster.swapped):
            self._settle_swapped(swapped)
        for group in list(self._roster.parents):
            self._settle_parent(group)

    # For good

    def _done(self) -> list[Sequence]:
        """Rows of which no token more is wanted; the last ones may be on their way."""
        return [
            sequence
            for sequence in self._roster.rows
            if sequence.num_tokens >= sequence.max_num_tokens
            or sequence.end is not None
            or sequence.group.error is not None
        ]

    def _leave(self, sequence: Sequence) -> None:
        group, block_ids = sequence.group, sequence.block_ids
        if group.siblings and group.error is None and sequence.is_first:
            if sequence.blocks_are_sound:
                # The prompt's stay for the siblings; nobody writes to them any more.
                num_held = blocks_for(sequence.num_prompt_tokens, self._draft.block_size)
                group.hold, block_ids = block_ids[:num_held], block_ids[num_held:]
            else:
                self.unfork(group)
        self._draft.release(sequence, block_ids)
        sequence.lose_place()
        self._roster.late.append(sequence)

    def _settle_late(self) -> None:
        """Lets go of those whose last tokens are known and, with this commit, journaled."""
        late, self._roster.late = self._roster.late, []
        for sequence in late:
            if sequence.is_over:
                self._let_go(sequence)
            elif sequence.last_step <= self._roster.landed_step:
                self._draft.forgotten.append(sequence.sequence_id)
                self._draft.recalled.append(sequence)
            else:
                self._roster.late.append(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        self._draft.forgotten.append(sequence.sequence_id)
        self._draft.left.append(sequence)

    def _settle_swapped(self, swapped: SwappedGroup) -> None:
        over = [sequence for sequence in swapped.sequences if sequence.is_over]
        if not over:
            return
        host_blocks = set(swapped.host_blocks)
        swapped.sequences = [sequence for sequence in swapped.sequences if not sequence.is_over]
        self._roster.host_blocks.give_back(host_blocks - set(swapped.host_blocks))
        for sequence in over:
            sequence.lose_place()
            self._let_go(sequence)
        if not swapped.sequences:
            self._roster.swapped.remove(swapped)

    def _settle_parent(self, group: Group) -> None:
        if group.error is not None:
            self._draft.left += group.siblings
            group.siblings = []
        if not group.siblings:
            self._forget_parent(group)

    def _forget_parent(self, group: Group) -> None:
        if group.hold is not None:
            self._draft.give_back(group.hold)
            group.hold = None
        self._roster.parents.remove(group)

    # To come back

    def preempt(self, sequence: Sequence) -> None:
        """Off its row, to be computed anew."""
        self._draft.release(sequence, sequence.block_ids)
        self._recompute(sequence)

    def _recompute(self, sequence: Sequence) -> None:
        self._stats.num_preempted_by_recompute += 1
        if sequence.is_first and sequence.group in self._roster.parents:
            self._leave_siblings(sequence)
        sequence.lose_place()
        sequence.was_preempted = True
        self._roster.late.append(sequence)

    def _leave_siblings(self, source: Sequence) -> None:
        """Those of a source that gives way."""
        if source.num_tokens > source.num_prompt_tokens:
            # It may end before it is back, and they would wait for ever.
            self.unfork(source.group)
        else:
            self._roster.parents.remove(source.group)

    def swap_out(self, sequences: list[Sequence]) -> None:
        """A whole group off its rows, its blocks to the host."""
        self._stats.num_preempted_by_swap += len(sequences)
        device_blocks = list(dict.fromkeys(b for other in sequences for b in other.block_ids))
        host_blocks = self._roster.host_blocks.take(len(device_blocks))
        moved = dict(zip(device_blocks, host_blocks, strict=True))
        for source, destination in moved.items():
            self._draft.changes.swap_outs.add(source, destination)
        for sequence in sequences:
            self._draft.release(sequence, sequence.block_ids)
            sequence.block_ids = [moved[block_id] for block_id in sequence.block_ids]
            sequence.num_hit_blocks = sequence.num_published_blocks = 0
        self._roster.swap_out(SwappedGroup(sequences))

    def recall(self) -> None:
        """Everybody who can leave, to go on elsewhere."""
        for group in list(self._roster.parents):
            if group.siblings:
                self.unfork(group)
        for sequence in list(self._roster.rows):
            self.preempt(sequence)
        for swapped in list(self._roster.swapped):
            self.give_up(swapped)

    def give_up(self, swapped: SwappedGroup) -> None:
        """Off the host, to be computed anew."""
        self._roster.host_blocks.give_back(swapped.host_blocks)
        self._roster.swapped.remove(swapped)
        for sequence in swapped.sequences:
            self._recompute(sequence)

    def unfork(self, group: Group) -> None:
        """The siblings are admitted like others, with what the prefix cache has."""
        for sibling in group.siblings:
            sibling.was_preempted = True
        self._draft.recalled += group.siblings
        group.siblings = []
        self._forget_parent(group)

    # Failed rows

    def _withdraw(self, failed: Iterable[Sequence]) -> None:
        """Takes hashes back that failed rows published; who shares those blocks starts anew."""
        spoilt = {block_id for sequence in failed for block_id in sequence.published_blocks}
        if not spoilt:
            return
        for sequence in self._sharers(spoilt):
            sequence.blocks_are_sound = False
            if not sequence.is_over:
                self.preempt(sequence)
        self._draft.withdrawals = sorted(spoilt)
        for group in list(self._roster.parents):
            if group.hold is not None and not spoilt.isdisjoint(group.hold):
                self.unfork(group)
        # Where their blocks were on the device is not known any more.
        for swapped in list(self._roster.swapped):
            self.give_up(swapped)

    def _sharers(self, spoilt: set[int]) -> list[Sequence]:
        """Rows with spoilt blocks; what they published is spoilt, too, and enters the set."""
        sharers: list[Sequence] = []
        others = list(self._roster.rows)
        while met := [other for other in others if not spoilt.isdisjoint(other.block_ids)]:
            sharers += met
            others = [other for other in others if spoilt.isdisjoint(other.block_ids)]
            spoilt.update(block_id for other in met for block_id in other.published_blocks)
        return sharers

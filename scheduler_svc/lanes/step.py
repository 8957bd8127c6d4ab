"""One step of a lane: what comes free, what is decided, what is committed, what is sent.

The roster changes as the step is decided; nothing else may change it until the plan is built.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

from scheduler_svc.core.policy import blocks_for, schedule
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.core.view import (
    Admitted,
    Candidate,
    Decision,
    Forkable,
    Limits,
    Swapped,
    SwappedIn,
    View,
)
from scheduler_svc.lanes.plan import Changes
from scheduler_svc.lanes.roster import Roster, SwappedGroup
from scheduler_svc.store.types import (
    Admission,
    Commit,
    CommitReply,
    Joined,
    PrefixMatch,
    Publication,
    TokenRuns,
)


class Step:
    """Thrown away once its plan is built."""

    def __init__(
        self,
        number: int,
        roster: Roster,
        limits: Limits,
        num_usable_blocks: int,
        num_free_blocks: int,
        hashed: bool,
        stats: LaneStats,
    ) -> None:
        """`hashed`: blocks may be shared by their hashes."""
        self.number = number
        self.changes = Changes()
        # Those who are over, and those who go back to the queue, once the commit is through.
        self.left: list[Sequence] = []
        self.recalled: list[Sequence] = []
        # Scheduled sequences and those that sample, beside their rows; filled by `apply`.
        self.sequences: list[Sequence] = []
        self.due: list[Sequence] = []
        self.due_rows: list[int] = []
        self.runs = TokenRuns()
        self.journaled: list[Sequence] = []
        self._roster = roster
        self._rows = roster.rows
        self._limits = limits
        self._num_usable_blocks = num_usable_blocks
        self._num_free_blocks = num_free_blocks
        self._hashed = hashed
        self._stats = stats
        self._decision: Decision[Sequence] = Decision()
        self._swapped: dict[Swapped[Sequence], SwappedGroup] = {}
        self._withdrawals: list[int] = []
        self._publications: list[Publication] = []
        self._forgotten: list[int] = []
        self._shared: list[int] = []
        self._returned: list[int] = []

    # What comes free

    def settle(self, failed: Iterable[Sequence]) -> None:
        """Has everybody leave who is over. `failed` rows spoil the blocks that they published."""
        self._withdraw(failed)
        for sequence in self._leaving():
            self._leave(sequence)
        self._settle_late()
        for swapped in list(self._roster.swapped):
            self._settle_swapped(swapped)
        for group in list(self._roster.parents):
            self._settle_parent(group)

    def _leaving(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self._rows
            if sequence.num_tokens >= sequence.max_num_tokens
            or sequence.end is not None
            or sequence.group.error is not None
        ]

    def _leave(self, sequence: Sequence) -> None:
        group = sequence.group
        if group.siblings and group.error is None and sequence is group.sequences[0]:
            # The prompt's blocks stay for the siblings; nobody writes to them any more.
            num_held = blocks_for(sequence.num_prompt_tokens, self._limits.block_size)
            group.hold = sequence.block_ids[:num_held]
            self._give_back_row(sequence, sequence.block_ids[num_held:])
        else:
            self._give_back_row(sequence, sequence.block_ids)
        self._roster.late.append(sequence)

    def _give_back_row(self, sequence: Sequence, block_ids: list[int]) -> None:
        self._publish(sequence)
        self._give_back(block_ids)
        self.changes.released_rows.append(self._rows.release(sequence))
        sequence.lose_place()

    def _give_back(self, block_ids: list[int]) -> None:
        """From last to first, so that a prefix outlives its tails."""
        self._returned += reversed(block_ids)
        self._num_free_blocks += self._rows.let_go(block_ids)

    def _settle_late(self) -> None:
        """Lets go of those whose last tokens are known and, with this commit, journaled."""
        late, self._roster.late = self._roster.late, []
        for sequence in late:
            if sequence.is_over:
                self._let_go(sequence)
            elif sequence.last_step <= self._roster.landed_step:
                self._recall(sequence)
            else:
                self._roster.late.append(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        self._forgotten.append(sequence.sequence_id)
        self.left.append(sequence)

    def _recall(self, sequence: Sequence) -> None:
        self._forgotten.append(sequence.sequence_id)
        self.recalled.append(sequence)

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
            self.left += group.siblings
            group.siblings = []
        if not group.siblings:
            self._forget_parent(group)

    def _forget_parent(self, group: Group) -> None:
        if group.hold is not None:
            self._give_back(group.hold)
            group.hold = None
        self._roster.parents.remove(group)

    def _withdraw(self, failed: Iterable[Sequence]) -> None:
        """Takes hashes back that failed rows published; who shares those blocks starts anew."""
        spoilt = {block_id for sequence in failed for block_id in sequence.published_blocks}
        if not spoilt:
            return
        sharers = self._sharers(spoilt)
        self._withdrawals = sorted(spoilt)
        for sequence in sharers:
            sequence.blocks_are_sound = False
            if not sequence.is_over:
                self._preempt(sequence)
        for group in list(self._roster.parents):
            if group.hold is not None and not spoilt.isdisjoint(group.hold):
                self._unfork(group)
        # Where their blocks were on the device is not known any more.
        for swapped in list(self._roster.swapped):
            self._give_up(swapped)

    def _sharers(self, spoilt: set[int]) -> list[Sequence]:
        """Rows with spoilt blocks; what they published is spoilt, too."""
        sharers: list[Sequence] = []
        others = list(self._rows)
        while met := [other for other in others if not spoilt.isdisjoint(other.block_ids)]:
            sharers += met
            others = [other for other in others if spoilt.isdisjoint(other.block_ids)]
            spoilt.update(block_id for other in met for block_id in other.published_blocks)
        return sharers

    # What is decided

    def decide(self, candidates: Iterable[tuple[Sequence, PrefixMatch]]) -> None:
        """Asks the policy, and does what takes no block."""
        roster = self._roster
        ready = list(takewhile(lambda group: group.last_step <= roster.landed_step, roster.swapped))
        self._swapped = {Swapped(group.sequences, len(group.host_blocks)): group for group in ready}
        # Nobody passes a group or a sequence that is to come back and cannot yet.
        is_open = len(ready) == len(roster.swapped) and not roster.is_recalling
        view = View(
            running=list(self._rows),
            num_free_blocks=self._num_free_blocks,
            num_usable_blocks=self._num_usable_blocks,
            references=self._rows.references,
            forkable=[self._forkable(group) for group in roster.parents if self._forks(group)],
            swapped=list(self._swapped),
            num_free_host_blocks=roster.host_blocks.num_free,
            candidates=[self._candidate(*pair) for pair in candidates] if is_open else [],
            num_reserved_rows=sum(
                len(group.siblings) for group in roster.parents if not self._forks(group)
            ),
        )
        self._decision = decision = schedule(self._limits, view)
        for forkable in decision.unforked:
            self._unfork(forkable.siblings[0].group)
        for sequence in decision.preempted:
            self._preempt(sequence)
        for sequences in decision.swapped_out:
            self._swap_out(sequences)
        for swapped in decision.given_up:
            self._give_up(self._swapped[swapped])
        self._fork_prefixes()
        self._schedule()

    def _schedule(self) -> None:
        """Running rows count this step's tokens as computed from here on."""
        decision, number = self._decision, self.number
        num_decodes = decision.num_decodes
        for sequence in decision.scheduled[:num_decodes]:
            sequence.num_computed_tokens += 1
            sequence.num_tokens += 1
            sequence.last_step = number
        self.due += decision.scheduled[:num_decodes]
        for sequence, num_tokens in zip(
            decision.scheduled[num_decodes:],
            decision.num_scheduled_tokens[num_decodes:],
            strict=True,
        ):
            self._compute(sequence, num_tokens)
            self._publish(sequence)
        self.sequences += decision.scheduled

    def _compute(self, sequence: Sequence, num_tokens: int) -> None:
        """The step computes so many tokens of it, and samples the next behind the last one."""
        sequence.num_computed_tokens += num_tokens
        sequence.last_step = self.number
        if sequence.num_computed_tokens == sequence.num_tokens:
            sequence.num_tokens += 1
            self.due.append(sequence)

    def _candidate(self, sequence: Sequence, match: PrefixMatch) -> Candidate[Sequence]:
        is_source = sequence is sequence.group.sequences[0]
        return Candidate(
            sequence=sequence,
            block_hashes=self._hashes(sequence),
            num_hits=match.num_hits,
            num_free_hits=match.num_free_hits,
            num_rows=1 + len(sequence.group.siblings) if is_source else 1,
            is_new=not sequence.was_preempted,
        )

    def _forks(self, group: Group) -> bool:
        """The prompt is computed, if the plans in flight are counted."""
        source = group.sequences[0]
        return group.hold is not None or (
            source.row is not None and source.num_computed_tokens >= source.num_prompt_tokens
        )

    def _forkable(self, group: Group) -> Forkable[Sequence]:
        source = group.sequences[0] if group.hold is None else None
        return Forkable(list(group.siblings), source, group.hold)

    def _preempt(self, sequence: Sequence) -> None:
        self._stats.num_preempted_by_recompute += 1
        if sequence.group in self._roster.parents and sequence is sequence.group.sequences[0]:
            # Its siblings go with it.
            self._roster.parents.remove(sequence.group)
        self._give_back_row(sequence, sequence.block_ids)
        sequence.was_preempted = True
        self._roster.late.append(sequence)

    def _swap_out(self, sequences: list[Sequence]) -> None:
        self._stats.num_preempted_by_swap += len(sequences)
        device_blocks = list(dict.fromkeys(b for other in sequences for b in other.block_ids))
        moved = dict(
            zip(device_blocks, self._roster.host_blocks.take(len(device_blocks)), strict=True)
        )
        for source, destination in moved.items():
            self.changes.swap_outs.add(source, destination)
        for sequence in sequences:
            self._publish(sequence)
            self._give_back(sequence.block_ids)
            self.changes.released_rows.append(self._rows.release(sequence))
            sequence.block_ids = [moved[block_id] for block_id in sequence.block_ids]
            sequence.num_hit_blocks = sequence.num_published_blocks = 0
        self._roster.swap_out(SwappedGroup(sequences))

    def _give_up(self, swapped: SwappedGroup) -> None:
        self._roster.host_blocks.give_back(swapped.host_blocks)
        self._roster.swapped.remove(swapped)
        for sequence in swapped.sequences:
            self._stats.num_preempted_by_recompute += 1
            if sequence.group in self._roster.parents and sequence is sequence.group.sequences[0]:
                self._roster.parents.remove(sequence.group)
            sequence.lose_place()
            sequence.was_preempted = True
            self._roster.late.append(sequence)

    def _unfork(self, group: Group) -> None:
        """The siblings are admitted like others, with what the prefix cache has."""
        for sibling in group.siblings:
            sibling.was_preempted = True
        self.recalled += group.siblings
        group.siblings = []
        self._forget_parent(group)

    def _fork_prefixes(self) -> None:
        for _, sibling in self._decision.forked:
            prefix = self._prompt_blocks(sibling)[: self._num_whole_blocks(sibling)]
            self._shared += prefix
            self._rows.hold(prefix)

    def _prompt_blocks(self, sibling: Sequence) -> list[int]:
        group = sibling.group
        return group.sequences[0].block_ids if group.hold is None else group.hold

    def _num_whole_blocks(self, sibling: Sequence) -> int:
        """Blocks before the one that holds the prompt's last token."""
        return (sibling.num_prompt_tokens - 1) // self._limits.block_size

    # What is committed

    @property
    def is_empty(self) -> bool:
        return self._decision.is_empty and not (
            self.changes.released_rows
            or self._forgotten
            or self._returned
            or self._withdrawals
            or self.journaled
            or self.left
            or self.recalled
        )

    def journal(self, fresh: Iterable[Sequence]) -> None:
        """Takes up what sequences have got since the last commit."""
        runs, block_size = self.runs, self._limits.block_size
        for sequence in fresh:
            if sequence.is_cut:
                continue
            token_ids, first = sequence.token_ids, sequence.num_journaled
            end = len(token_ids)
            next_index = end - sequence.num_prompt_tokens
            runs.sequence_ids.append(sequence.sequence_id)
            runs.first_indices.append(first)
            runs.next_indices.append(next_index)
            if next_index - first == 1:
                runs.token_ids.append(token_ids[-1])
            else:
                runs.token_ids.extend(token_ids[sequence.num_prompt_tokens + first :])
            self.journaled.append(sequence)
            if end // block_size > sequence.num_published_blocks and sequence.row is not None:
                self._publish(sequence)

    def commit(self) -> Commit:
        decision = self._decision
        return Commit(
            step=self.number,
            withdrawals=self._withdrawals,
            publications=self._publications,
            runs=self.runs,
            forgotten=self._forgotten,
            shared_blocks=self._shared,
            returned_blocks=self._returned,
            taken_references=self._taken_references(),
            joined=[Joined(sibling.sequence_id, 0) for _, sibling in decision.forked],
            admissions=[self._admission(entry) for entry in decision.admitted],
        )

    def _publish(self, sequence: Sequence) -> None:
        """The blocks that are full of known tokens, once the step being planned has run."""
        if not (self._hashed and sequence.blocks_are_sound):
            return
        first = sequence.num_published_blocks
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = min(num_known // self._limits.block_size, len(sequence.block_ids))
        if num_full > first:
            hashes = sequence.hashes()[first:num_full]
            for block_id, block_hash in zip(
                sequence.block_ids[first:num_full], hashes, strict=True
            ):
                self._publications.append(Publication(block_id, block_hash))
            sequence.num_published_blocks = num_full

    def _taken_references(self) -> list[int]:
        """Of appends, then of groups that come back, then of forks."""
        references = [1] * sum(count for _, count in self._decision.appends)
        for back in self._decision.swapped_in:
            tables = Counter(b for other in back.group.sequences for b in other.block_ids)
            references += tables.values()
            references += [1] * sum(back.num_new_blocks)
        return references + [1] * len(self._decision.forked)

    def _admission(self, entry: Admitted[Sequence]) -> Admission:
        sequence, num_hits = entry.sequence, entry.num_hits
        hashes = self._hashes(sequence)
        num_computed = num_hits * self._limits.block_size + entry.num_scheduled_tokens
        return Admission(
            sequence_id=sequence.sequence_id,
            num_output_tokens=sequence.num_journaled,
            hit_hashes=hashes[:num_hits],
            num_new_blocks=entry.num_new_blocks,
            fill_hashes=hashes[num_hits : num_computed // self._limits.block_size],
        )

    def _hashes(self, sequence: Sequence) -> tuple[bytes, ...]:
        return sequence.hashes() if self._hashed else ()

    # What is sent

    def apply(self, reply: CommitReply) -> None:
        """Hands the blocks out; `changes` are complete then."""
        decision = self._decision
        self.changes.num_scheduled_tokens += decision.num_scheduled_tokens
        taken = iter(reply.taken)
        for sequence, count in decision.appends:
            assert sequence.row is not None
            block_ids = list(islice(taken, count))
            self._extend(sequence, block_ids)
            self.changes.appended.append((sequence.row, block_ids))
        for back in decision.swapped_in:
            self._swap_in(back, taken)
        for _, sibling in decision.forked:
            self._fork(sibling, next(taken))
        for entry, table in zip(decision.admitted, reply.admitted, strict=True):
            # None: its hits are gone since the match; it is considered again.
            if table is not None:
                self._admit(entry, list(table))
        # Whoever came in this step has its row now.
        self.changes.rows = _rows_of(self.sequences)
        self.due_rows = _rows_of(self.due)

    def _extend(self, sequence: Sequence, block_ids: list[int]) -> None:
        sequence.block_ids += block_ids
        self._rows.hold(block_ids)

    def _start(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives a row to a sequence whose blocks are there, and runs it."""
        self._rows.admit(sequence)
        self.changes.admit(sequence)
        if num_tokens:
            self._compute(sequence, num_tokens)
            self.sequences.append(sequence)
            self.changes.num_scheduled_tokens.append(num_tokens)

    def _swap_in(self, back: SwappedIn[Sequence], taken: Iterator[int]) -> None:
        swapped = self._swapped[back.group]
        host_blocks = swapped.host_blocks
        moved = dict(zip(host_blocks, islice(taken, len(host_blocks)), strict=True))
        for source, destination in moved.items():
            self.changes.swap_ins.add(source, destination)
        self._roster.swapped.remove(swapped)
        self._roster.host_blocks.give_back(host_blocks)
        for sequence, num_tokens, num_new in zip(
            swapped.sequences, back.num_scheduled_tokens, back.num_new_blocks, strict=True
        ):
            sequence.block_ids = [moved[block_id] for block_id in sequence.block_ids]
            self._rows.hold(sequence.block_ids)
            self._extend(sequence, list(islice(taken, num_new)))
            self._start(sequence, num_tokens)

    def _fork(self, sibling: Sequence, block_id: int) -> None:
        blocks, num_whole = self._prompt_blocks(sibling), self._num_whole_blocks(sibling)
        position = sibling.num_prompt_tokens - 1
        if position % self._limits.block_size:
            self.changes.copies.add(blocks[num_whole], block_id)
        group = sibling.group
        group.siblings.remove(sibling)
        sibling.block_ids = blocks[:num_whole]
        self._extend(sibling, [block_id])
        sibling.num_computed_tokens = position
        sibling.num_hit_blocks = sibling.num_published_blocks = num_whole
        sibling.num_cached_tokens = group.sequences[0].num_cached_tokens
        self._start(sibling, 1)

    def _admit(self, entry: Admitted[Sequence], table: list[int]) -> None:
        sequence, block_size = entry.sequence, self._limits.block_size
        num_cached = entry.num_hits * block_size
        self._roster.assigned.remove(sequence)
        self._extend(sequence, table)
        sequence.num_computed_tokens = num_cached
        sequence.num_hit_blocks = entry.num_hits
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
        if sequence.group.siblings and sequence is sequence.group.sequences[0]:
            self._roster.parents.append(sequence.group)
        self._start(sequence, entry.num_scheduled_tokens)
        sequence.num_published_blocks = sequence.num_computed_tokens // block_size
        self._stats.num_queried_tokens += len(sequence.token_ids)
        self._stats.num_hit_tokens += num_cached


def _rows_of(sequences: list[Sequence]) -> list[int]:
    return [sequence.row for sequence in sequences if sequence.row is not None]

"""Who gets a row in a step, with which blocks."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.core.view import Admitted, Decision, SwappedIn
from scheduler_svc.lanes.draft import Draft
from scheduler_svc.lanes.roster import Roster, SwappedGroup
from scheduler_svc.store.types import Admission, CommitReply


class Arriving:
    """What is taken is asked for before the commit, and handed out after it, in one order:
    appends, groups that come back, forks; then admissions."""

    def __init__(
        self, draft: Draft, roster: Roster, decision: Decision[Sequence], stats: LaneStats
    ) -> None:
        self._draft = draft
        self._roster = roster
        self._decision = decision
        self._stats = stats

    # Before the commit

    def share_prefixes(self) -> None:
        """Forks have the full blocks before the prompt's last token in common."""
        for _, sibling in self._decision.forked:
            self._draft.share(_prompt_blocks(sibling)[: self._num_whole_blocks(sibling)])

    def taken_references(self) -> list[int]:
        references = [1] * sum(count for _, count in self._decision.appends)
        for back in self._decision.swapped_in:
            tables = Counter(b for other in back.group.sequences for b in other.block_ids)
            references += tables.values()
            references += [1] * sum(back.num_new_blocks)
        return references + [1] * len(self._decision.forked)

    def admissions(self) -> list[Admission]:
        return [self._admission(entry) for entry in self._decision.admitted]

    def _admission(self, entry: Admitted[Sequence]) -> Admission:
        sequence, num_hits = entry.sequence, entry.num_hits
        hashes, block_size = self._draft.hashes(sequence), self._draft.block_size
        num_computed = num_hits * block_size + entry.num_scheduled_tokens
        return Admission(
            sequence_id=sequence.sequence_id,
            num_output_tokens=sequence.num_journaled,
            hit_hashes=hashes[:num_hits],
            num_new_blocks=entry.num_new_blocks,
            fill_hashes=hashes[num_hits : num_computed // block_size],
        )

    # After it

    def hand_out(self, reply: CommitReply) -> None:
        taken = iter(reply.taken)
        for sequence, count in self._decision.appends:
            assert sequence.row is not None
            block_ids = list(islice(taken, count))
            self._extend(sequence, block_ids)
            self._draft.changes.appended.append((sequence.row, block_ids))
        for back in self._decision.swapped_in:
            self._swap_in(back, taken)
        for _, sibling in self._decision.forked:
            self._fork(sibling, next(taken))
        for entry, table in zip(self._decision.admitted, reply.admitted, strict=True):
            # None: its hits are gone since the match; it is considered again.
            if table is not None:
                self._admit(entry, list(table))

    def _extend(self, sequence: Sequence, block_ids: list[int]) -> None:
        sequence.block_ids += block_ids
        self._draft.rows.hold(block_ids)

    def _start(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives a row to a sequence whose blocks are there, and runs it."""
        self._draft.rows.admit(sequence)
        self._draft.changes.admit(sequence)
        if num_tokens:
            self._draft.changes.num_scheduled_tokens.append(num_tokens)
            self._draft.compute(sequence, num_tokens)

    def _swap_in(self, back: SwappedIn[Sequence], taken: Iterator[int]) -> None:
        # A copy: the group is taken from the roster, its tables change.
        swapped = SwappedGroup(list(back.group.sequences))
        host_blocks = swapped.host_blocks
        moved = dict(zip(host_blocks, islice(taken, len(host_blocks)), strict=True))
        for source, destination in moved.items():
            self._draft.changes.swap_ins.add(source, destination)
        self._roster.swap_in(swapped)
        for sequence, num_tokens, num_new in zip(
            swapped.sequences, back.num_scheduled_tokens, back.num_new_blocks, strict=True
        ):
            block_ids = [moved[block_id] for block_id in sequence.block_ids]
            sequence.block_ids = []
            self._extend(sequence, block_ids)
            self._extend(sequence, list(islice(taken, num_new)))
            self._start(sequence, num_tokens)

    def _fork(self, sibling: Sequence, block_id: int) -> None:
        blocks, num_whole = _prompt_blocks(sibling), self._num_whole_blocks(sibling)
        position = sibling.num_prompt_tokens - 1
        if position % self._draft.block_size:
            self._draft.changes.copies.add(blocks[num_whole], block_id)
        group = sibling.group
        group.siblings.remove(sibling)
        sibling.block_ids = blocks[:num_whole]
        self._extend(sibling, [block_id])
        sibling.num_computed_tokens = position
        sibling.num_hit_blocks = sibling.num_published_blocks = num_whole
        sibling.num_cached_tokens = group.sequences[0].num_cached_tokens
        self._start(sibling, 1)

    def _num_whole_blocks(self, sibling: Sequence) -> int:
        """Blocks before the one that holds the prompt's last token."""
        return (sibling.num_prompt_tokens - 1) // self._draft.block_size

    def _admit(self, entry: Admitted[Sequence], table: list[int]) -> None:
        sequence, block_size = entry.sequence, self._draft.block_size
        num_cached = entry.num_hits * block_size
        self._roster.assigned.remove(sequence)
        self._extend(sequence, table)
        sequence.num_computed_tokens = num_cached
        sequence.num_hit_blocks = entry.num_hits
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
        if sequence.is_first and sequence.group.siblings:
            self._roster.parents.append(sequence.group)
        self._start(sequence, entry.num_scheduled_tokens)
        sequence.num_published_blocks = sequence.num_computed_tokens // block_size
        self._count(sequence, num_cached)

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
    return group.sequences[0].block_ids if group.hold is None else group.hold

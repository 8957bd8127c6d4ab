"""Chooses what to preempt when running sequences are short of blocks. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from scheduler_svc.core.view import Forkable, LaneView, PreemptionMode, SeqT


@dataclass(slots=True)
class Victims(Generic[SeqT]):
    """What to preempt, in the order in which it was chosen."""

    recomputed: list[SeqT] = field(default_factory=list)
    swapped: list[list[SeqT]] = field(default_factory=list)
    # Beams that miss blocks although nothing else runs.
    exhausted: list[SeqT] = field(default_factory=list)
    cancelled_forks: list[Forkable[SeqT]] = field(default_factory=list)
    num_freed_blocks: int = 0

    @property
    def rows(self) -> list[SeqT]:
        swapped = (row for group in self.swapped for row in group)
        return [*self.recomputed, *swapped, *self.exhausted]


def choose_victims(
    view: LaneView[SeqT], mode: PreemptionMode, missing: Mapping[SeqT, int], num_needed: int
) -> Victims[SeqT]:
    """Choose what frees enough blocks for the remaining rows to have the blocks they miss.

    Blocks pinned for siblings go first, as they cost no work; then rows whose clients have
    disconnected; then the others. Both are chosen from the last in order.
    `missing` is the number of blocks that each row needs, `num_needed` their sum.
    """
    references = Counter(view.references)
    pinned = [group for group in view.forkable if group.pinned_blocks is not None]
    remaining = sorted(view.running, key=lambda row: (row.is_abandoned, row.order))
    num_free_host_blocks = view.num_free_host_blocks
    chosen: Victims[SeqT] = Victims()
    while num_needed > view.num_free_blocks + chosen.num_freed_blocks and (pinned or remaining):
        if pinned:
            group = pinned.pop()
            assert group.pinned_blocks is not None
            chosen.cancelled_forks.append(group)
            chosen.num_freed_blocks += _release(group.pinned_blocks, references)
            continue
        victims = _group_of_last(remaining)
        num_blocks = len({block_id for row in victims for block_id in row.block_ids})
        fits = num_blocks <= num_free_host_blocks
        is_whole = not _is_partly_preempted(victims, chosen.recomputed)
        if fits and is_whole and _swaps(mode, victims, remaining):
            num_free_host_blocks -= num_blocks
            chosen.swapped.append(victims)
        elif not victims[0].is_beam:
            victims = [remaining[-1]]
            chosen.recomputed += victims
        elif _holds_all(victims, references):
            # They would come back to the same pool and miss the same blocks.
            chosen.exhausted += victims
        else:
            chosen.recomputed += victims
        del remaining[-len(victims) :]
        for row in victims:
            num_needed -= missing.get(row, 0)
            chosen.num_freed_blocks += _release(row.block_ids, references)
    return chosen


def _group_of_last(remaining: Sequence[SeqT]) -> list[SeqT]:
    return [row for row in remaining if row.order[:2] == remaining[-1].order[:2]]


def _is_partly_preempted(group: Sequence[SeqT], recomputed: Sequence[SeqT]) -> bool:
    """Whether part of the group is preempted already: a group is swapped whole or not at all."""
    return bool(recomputed) and recomputed[-1].order[:2] == group[0].order[:2]


def _swaps(mode: PreemptionMode, group: Sequence[SeqT], remaining: Sequence[SeqT]) -> bool:
    # A group that runs alone would return to the same pool and miss the same blocks.
    if mode is PreemptionMode.RECOMPUTE or len(group) == len(remaining):
        return False
    return mode is PreemptionMode.SWAP or len(group) > 1


def _holds_all(rows: Sequence[SeqT], references: Counter[int]) -> bool:
    """Whether these rows have all references to blocks that are left."""
    return references.total() == sum(len(row.block_ids) for row in rows)


def _release(block_ids: Sequence[int], references: Counter[int]) -> int:
    """Drop one reference per block; return the number of blocks that lose their last one."""
    num_freed = 0
    for block_id in block_ids:
        references[block_id] -= 1
        num_freed += references[block_id] == 0
    return num_freed

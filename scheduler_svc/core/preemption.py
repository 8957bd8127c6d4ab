"""Who gives blocks back when running sequences are short of them. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from scheduler_svc.core.view import Forkable, PreemptionMode, R, View


@dataclass(slots=True)
class TakenBack(Generic[R]):
    """Who gave way, the last in order first."""

    recomputed: list[R] = field(default_factory=list)
    swapped: list[list[R]] = field(default_factory=list)
    unforked: list[Forkable[R]] = field(default_factory=list)
    num_freed_blocks: int = 0

    @property
    def rows(self) -> list[R]:
        return [*self.recomputed, *(row for group in self.swapped for row in group)]


def take_back(
    view: View[R], mode: PreemptionMode, missing: Mapping[R, int], num_needed: int
) -> TakenBack[R]:
    """Frees blocks until those who stay can have what they miss.

    Holds go first, as no work is lost with them; then rows, from the last in order on.
    `missing` is what each row needs, `num_needed` their sum.
    """
    references = Counter(view.references)
    holds = [group for group in view.forkable if group.hold is not None]
    alive = sorted(view.running, key=lambda row: row.order)
    num_free_host_blocks = view.num_free_host_blocks
    taken: TakenBack[R] = TakenBack()
    while num_needed > view.num_free_blocks + taken.num_freed_blocks and (holds or alive):
        if holds:
            group = holds.pop()
            assert group.hold is not None
            taken.unforked.append(group)
            taken.num_freed_blocks += _release(group.hold, references)
            continue
        victims = _group_of_last(alive)
        num_blocks = len({block_id for row in victims for block_id in row.block_ids})
        fits = num_blocks <= num_free_host_blocks and not _is_broken(victims, taken.recomputed)
        if fits and _swaps(mode, victims, alive):
            num_free_host_blocks -= num_blocks
            taken.swapped.append(victims)
        else:
            victims = [alive[-1]]
            taken.recomputed += victims
        del alive[-len(victims) :]
        for row in victims:
            num_needed -= missing.get(row, 0)
            taken.num_freed_blocks += _release(row.block_ids, references)
    return taken


def _group_of_last(alive: Sequence[R]) -> list[R]:
    return [row for row in alive if row.order[:2] == alive[-1].order[:2]]


def _is_broken(group: Sequence[R], recomputed: Sequence[R]) -> bool:
    """A sequence of the group has given way already: a group is swapped whole or not at all."""
    return bool(recomputed) and recomputed[-1].order[:2] == group[0].order[:2]


def _swaps(mode: PreemptionMode, group: Sequence[R], alive: Sequence[R]) -> bool:
    # A group that runs alone would come back to the same pool and be short of the same blocks.
    if mode is PreemptionMode.RECOMPUTE or len(group) == len(alive):
        return False
    return mode is PreemptionMode.SWAP or len(group) > 1


def _release(block_ids: Sequence[int], references: Counter[int]) -> int:
    """The number of blocks that lose their last reference."""
    num_freed = 0
    for block_id in block_ids:
        references[block_id] -= 1
        num_freed += references[block_id] == 0
    return num_freed

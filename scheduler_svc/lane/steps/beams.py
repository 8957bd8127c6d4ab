"""The beams of one lane in a step: forks them as their searches have chosen, and admits them again.

A beam that is continued once keeps its row and its blocks. Its other continuations share its full
blocks, and get a copy of the partial one when they run. They take the rows of beams that are not
continued, whose blocks are returned, or rows that the group has not used yet.
"""

from array import array
from dataclasses import dataclass

from scheduler_svc.beams.state import Child
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.view import StepDecision
from scheduler_svc.lane.sequence_table import SequenceTable
from scheduler_svc.lane.steps.step_builder import StepBuilder
from scheduler_svc.store.hashing import HashChain


@dataclass(frozen=True, slots=True)
class _Parent:
    """A beam before it is continued. All its tokens are computed."""

    sequence: Sequence
    token_ids: "array[int]"
    block_ids: list[int]
    num_published_blocks: int
    chain: HashChain
    blocks_are_valid: bool

    @classmethod
    def of(cls, sequence: Sequence) -> "_Parent":
        assert sequence.chain is not None
        return cls(
            sequence,
            sequence.token_ids,
            sequence.block_ids,
            sequence.num_published_blocks,
            sequence.chain,
            sequence.blocks_are_valid,
        )


class StepBeams:
    """Built in the order of its methods."""

    def __init__(self, builder: StepBuilder, table: SequenceTable) -> None:
        self._builder = builder
        self._table = table
        # Beams that run and are admitted for it, with the tokens that they compute.
        self._admitted: list[tuple[Sequence, int]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._admitted)

    def fork(self) -> None:
        """Continue the beams of all searches that have chosen."""
        for group in self._table.beam_groups:
            if group.error is None and group.beams is not None and group.beams.children:
                children, group.beams.children = group.beams.children, None
                self._continue(group, children)

    def take_out(self, decision: StepDecision[Sequence]) -> None:
        """Take the beams that must be admitted again out of a decision."""
        if not self._table.beam_groups:
            return
        pairs = list(zip(decision.scheduled, decision.num_scheduled_tokens, strict=True))
        decodes = [pair for pair in pairs[: decision.num_decodes] if not pair[0].is_beam]
        others = [pair for pair in pairs[: decision.num_decodes] if pair[0].is_beam]
        others += pairs[decision.num_decodes :]
        self._admitted = [pair for pair in others if pair[0].is_changed]
        kept = [*decodes, *(pair for pair in others if not pair[0].is_changed)]
        decision.num_decodes = len(decodes)
        decision.scheduled = [sequence for sequence, _ in kept]
        decision.num_scheduled_tokens = [num_tokens for _, num_tokens in kept]
        running = {sequence for sequence, _ in self._admitted}
        for sequence in (other for group in self._table.beam_groups for other in group.sequences):
            if sequence.is_changed and sequence not in running:
                self._postpone(sequence)

    def _postpone(self, sequence: Sequence) -> None:
        """Do without the copy, whose source may go: compute the tokens again. The worker's row has
        blocks that may be given to others: it is released."""
        if sequence.copied_block is not None:
            sequence.copied_block = None
            sequence.num_computed_tokens = len(sequence.block_ids) * self._builder.block_size
        if sequence.is_on_worker and sequence.row is not None:
            self._builder.plan.released_rows.append(sequence.row)
            sequence.is_on_worker = False

    def admit(self) -> None:
        """Admit them, with all their blocks, in the place of what their rows had."""
        plan = self._builder.plan
        for sequence, num_tokens in self._admitted:
            assert sequence.row is not None
            if sequence.is_on_worker:
                plan.released_rows.append(sequence.row)
            plan.admit(sequence)
            sequence.is_on_worker, sequence.is_changed = True, False
            plan.num_scheduled_tokens.append(num_tokens)
            self._builder.compute(sequence, num_tokens)

    def _continue(self, group: Group, children: list[Child]) -> None:
        beams, block_size = group.beams, self._builder.block_size
        assert beams is not None
        sequences = [group.sequences[choice] for choice in beams.choices]
        continued = {child.parent for child in children}
        for at in continued:
            self._builder.publish(sequences[at])
        parents = [_Parent.of(sequence) for sequence in sequences]
        lost = [parent for at, parent in enumerate(parents) if at not in continued]
        free = [parent.sequence for parent in lost]
        placed: list[tuple[Sequence, Child]] = []
        forks: list[tuple[Sequence, _Parent, Child]] = []
        for child in children:
            parent = parents[child.parent]
            if child.parent in continued:
                continued.remove(child.parent)
                placed.append((parent.sequence, child))
                continue
            sequence = free.pop(0) if free else self._new_row(group)
            placed.append((sequence, child))
            forks.append((sequence, parent, child))
            self._builder.share(parent.block_ids[: len(parent.token_ids) // block_size])
        assert not free, "a search never has fewer beams than before"
        for parent in lost:
            self._builder.return_blocks(parent.block_ids)
        for sequence, parent, _ in forks:
            self._fork(sequence, parent)
        for sequence, child in placed:
            sequence.token_ids = sequence.token_ids + array("I", [child.token_id])
            sequence.num_tokens = len(sequence.token_ids)
            sequence.is_changed = True
        beams.choices = [sequence.choice for sequence, _ in placed]

    def _new_row(self, group: Group) -> Sequence:
        sequence = group.siblings.pop(0)
        self._builder.rows.admit(sequence)
        return sequence

    def _fork(self, sequence: Sequence, parent: _Parent) -> None:
        """Give a sequence the tokens and the full blocks of another one."""
        num_tokens = len(parent.token_ids)
        num_whole, num_more = divmod(num_tokens, self._builder.block_size)
        sequence.token_ids = parent.token_ids
        sequence.chain = parent.chain.fork(num_tokens)
        sequence.block_ids = parent.block_ids[:num_whole]
        sequence.copied_block = parent.block_ids[num_whole] if num_more else None
        sequence.num_computed_tokens = sequence.num_certain_tokens = num_tokens
        num_published = min(num_whole, parent.num_published_blocks)
        sequence.num_hit_blocks = sequence.num_published_blocks = num_published
        sequence.blocks_are_valid = parent.blocks_are_valid

"""One step of a lane: releases, decision, commit and plan.

The sequence table changes as the step is decided; nothing else may change it until the plan is
built.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from typing import Final

from scheduler_svc.core.policy import schedule
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.core.view import Candidate, Forkable, LaneView, Limits, StepDecision, Swapped
from scheduler_svc.lane.in_flight import ScheduledRows
from scheduler_svc.lane.sequence_table import SequenceTable, SwappedGroup
from scheduler_svc.lane.steps.admission import StepAdmission
from scheduler_svc.lane.steps.beams import StepBeams
from scheduler_svc.lane.steps.release import StepRelease
from scheduler_svc.lane.steps.step_builder import StepBuilder
from scheduler_svc.store.types import Commit, CommitReply, ForkedSequence, PrefixMatch

_LOOKAHEAD: Final = attrgetter("num_lookahead_tokens")


class Step:
    """Built in this order: releases, decision, journal, commit, reply."""

    def __init__(
        self,
        builder: StepBuilder,
        table: SequenceTable,
        limits: Limits,
        num_usable_blocks: int,
        stats: LaneStats,
        num_micro_batches: int,
        max_prompt_tokens: int,
        num_rounds_in_flight: int,
    ) -> None:
        """With several micro-batches, a row in flight is neither run nor released, so that no plan
        waits for the result of another one."""
        self.builder = builder
        self._table = table
        self._limits = limits
        self._num_usable_blocks = num_usable_blocks
        self._stats = stats
        self._num_micro_batches = num_micro_batches
        self._max_prompt_tokens = max_prompt_tokens
        self._num_rounds_in_flight = num_rounds_in_flight if num_micro_batches == 1 else 0
        self._in_flight = table.rows_in_flight() if num_micro_batches > 1 else frozenset()
        self.release = StepRelease(builder, table, stats, self._in_flight)
        self.beams = StepBeams(builder, table)
        # Set by the decision.
        self._decision: StepDecision[Sequence]
        self._admission: StepAdmission

    @property
    def is_empty(self) -> bool:
        has_work = self.beams.has_work or not self._decision.is_empty
        return not has_work and self.builder.is_empty

    @property
    def admitting(self) -> list[Sequence]:
        """Sequences that get a row, if the commit confirms their cache hits."""
        return [entry.sequence for entry in self._decision.admitted]

    @property
    def frees_capacity(self) -> bool:
        """Whether the lane may have capacity that it did not have before."""
        return not (self._decision.only_decodes and self.builder.releases_nothing)

    def decide(self, candidates: Iterable[tuple[Sequence, PrefixMatch]], num_rounds: int) -> None:
        """Run the policy, and apply what takes no blocks. `candidates` come with their cached
        prefixes; `num_rounds` bounds the rounds of a step that only decodes."""
        # Nothing may overtake a swapped or preempted sequence that cannot be admitted yet.
        ready = list(takewhile(self._is_ready, self._table.swapped))
        is_open = len(ready) == len(self._table.swapped) and not self._is_preempting
        swapped = {Swapped(other.sequences, len(other.host_blocks)): other for other in ready}
        view = self._view(list(swapped), candidates if is_open else (), num_rounds)
        self._apply_decision(schedule(self._limits, view), swapped)

    def decide_alone(
        self, suspect: Sequence, candidates: Iterable[tuple[Sequence, PrefixMatch]]
    ) -> None:
        """Run one sequence alone; the other rows keep their blocks."""
        # While sequences are being preempted, all assigned ones are requeued.
        found = [pair for pair in candidates if pair[0] is suspect]
        view = self._view([], () if self._is_preempting else found)
        running = [row for row in view.running if row is suspect or _are_beams(row, suspect)]
        num_others = len(view.running) - len(running)
        num_siblings = sum(len(group.siblings) for group in view.forkable)
        alone = replace(
            view,
            running=running,
            forkable=(),
            num_reserved_rows=view.num_reserved_rows + num_siblings + num_others,
        )
        self._apply_decision(schedule(self._limits, alone), {})

    @property
    def _is_preempting(self) -> bool:
        return bool(self._table.is_preempting or self.builder.requeued)

    def _apply_decision(
        self, decision: StepDecision[Sequence], swapped: Mapping[Swapped[Sequence], SwappedGroup]
    ) -> None:
        self._decision = decision
        self.beams.take_out(decision)
        for forkable in decision.cancelled_forks:
            self.release.cancel_forks(forkable.siblings[0].group)
        for sequence in decision.preempted:
            self.release.preempt(sequence)
        for sequence in decision.exhausted:
            self.release.exhaust(sequence, self._num_usable_blocks)
        for sequences in decision.swapped_out:
            self.release.swap_out(sequences)
        for discarded in decision.discarded:
            self.release.discard_swapped(swapped[discarded])
        self._admission = StepAdmission(
            self.builder, self._table, decision, self.beams, self._stats
        )
        self._admission.share_prefixes()
        self._schedule()

    def commit(self) -> Commit:
        builder = self.builder
        return Commit(
            step=builder.step_number,
            withdrawals=builder.withdrawals,
            publications=builder.publications,
            token_ranges=builder.token_ranges,
            removed=builder.removed,
            shared_blocks=builder.shared,
            returned_blocks=builder.returned,
            taken_references=self._admission.taken_references(),
            added=[ForkedSequence(sibling.sequence_id, 0) for _, sibling in self._decision.forked],
            admissions=self._admission.admissions(),
        )

    def apply(self, reply: CommitReply) -> ScheduledRows:
        """Assign the blocks; the plan's contents are complete then."""
        builder = self.builder
        builder.plan.num_scheduled_tokens += self._decision.num_scheduled_tokens
        builder.plan.num_rounds = self._decision.num_rounds
        self._admission.apply(reply)
        # Sequences admitted in this step have their rows now.
        builder.plan.rows = _rows_of(builder.sequences)
        builder.plan.num_lookahead_tokens = _num_lookahead_tokens(builder)
        return ScheduledRows(
            builder.plan.rows,
            builder.sequences,
            _rows_of(builder.sampling),
            builder.sampling,
            builder.plan.num_lookahead_tokens,
        )

    def _is_ready(self, swapped: SwappedGroup) -> bool:
        """Whether all of its tokens are known, so that it can be swapped in."""
        return swapped.last_step <= self._table.completed_step

    def _view(
        self,
        swapped: list[Swapped[Sequence]],
        candidates: Iterable[tuple[Sequence, PrefixMatch]],
        num_rounds: int = 1,
    ) -> LaneView[Sequence]:
        table = self._table
        groups = {group: _is_computed(group) for group in table.forking_groups}
        return LaneView(
            running=list(table.rows),
            num_free_blocks=self.builder.num_free_blocks,
            num_usable_blocks=self._num_usable_blocks,
            references=table.rows.references,
            forkable=[_forkable(group) for group, computed in groups.items() if computed],
            swapped=swapped,
            num_free_host_blocks=table.swap_space.num_free,
            candidates=[self._candidate(*pair) for pair in candidates],
            num_reserved_rows=sum(
                len(group.siblings) for group, computed in groups.items() if not computed
            ),
            max_prompt_tokens=self._max_prompt_tokens,
            num_rounds=num_rounds,
            num_rounds_in_flight=self._num_rounds_in_flight,
            num_micro_batches=self._num_micro_batches,
            in_flight=self._in_flight,
        )

    def _candidate(self, sequence: Sequence, match: PrefixMatch) -> Candidate[Sequence]:
        hashes = self.builder.hashes(sequence)
        if sequence.num_wanted_prompt_logprobs:
            hashes = hashes[: sequence.num_cacheable_tokens // self.builder.block_size]
        return Candidate(
            sequence=sequence,
            block_hashes=hashes,
            num_hits=match.num_hits,
            num_free_hits=match.num_free_hits,
            num_rows=sequence.num_wanted_rows,
            is_new=not sequence.has_precedence,
        )

    def _schedule(self) -> None:
        """Count this step's tokens as computed, and collect the sequences that sample."""
        builder, decision, number = self.builder, self._decision, self.builder.step_number
        decodes = decision.scheduled[: decision.num_decodes]
        if decision.num_rounds:
            self._schedule_rounds(decodes, decision.num_rounds)
            return
        # `builder.compute` inlined: this is the longest loop of a busy lane.
        for sequence in decodes:
            sequence.num_computed_tokens += 1
            sequence.num_tokens += 1
            sequence.last_step = number
        builder.sequences += decodes
        builder.sampling += decodes
        for sequence, num_tokens in zip(
            decision.scheduled[len(decodes) :],
            decision.num_scheduled_tokens[len(decodes) :],
            strict=True,
        ):
            builder.compute(sequence, num_tokens)
            builder.publish(sequence)

    def _schedule_rounds(self, decodes: list[Sequence], num_rounds: list[int]) -> None:
        builder, number = self.builder, self.builder.step_number
        for sequence, count in zip(decodes, num_rounds, strict=True):
            sequence.num_computed_tokens += count
            sequence.num_tokens += count
            sequence.last_step = number
        builder.sequences += decodes
        for done in range(max(num_rounds)):
            builder.sampling += [
                other for other, count in zip(decodes, num_rounds, strict=True) if count > done
            ]


def _is_computed(group: Group) -> bool:
    """Whether its prompt is computed, plans in flight included, and its siblings can be forked."""
    source = group.sequences[0]
    if group.beams is not None:
        # It forks its beams itself; their rows are reserved.
        return False
    return group.pinned_blocks is not None or (
        source.row is not None and source.num_computed_tokens >= source.num_prompt_tokens
    )


def _are_beams(row: Sequence, other: Sequence) -> bool:
    """Whether both are beams of one search."""
    return row.is_beam and row.group is other.group


def _forkable(group: Group) -> Forkable[Sequence]:
    source = group.sequences[0] if group.pinned_blocks is None else None
    return Forkable(list(group.siblings), source, group.pinned_blocks)


def _num_lookahead_tokens(builder: StepBuilder) -> list[int]:
    """Of each scheduled row: rows that do not sample have none. Empty if no row has any."""
    if not any(map(_LOOKAHEAD, builder.sequences)):
        return []
    sampling = set(builder.sampling)
    return [
        sequence.num_lookahead_tokens if sequence in sampling else 0
        for sequence in builder.sequences
    ]


def _rows_of(sequences: list[Sequence]) -> list[int]:
    return [sequence.row for sequence in sequences if sequence.row is not None]

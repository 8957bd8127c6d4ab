"""One step of a lane: who leaves, what is decided, what is committed, what is sent.

The roster changes as the step is decided; nothing else may change it until the plan is built.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile

from scheduler_svc.core.policy import schedule
from scheduler_svc.core.sequence import Group, Sequence
from scheduler_svc.core.stats import LaneStats
from scheduler_svc.core.view import Candidate, Decision, Forkable, Limits, Swapped, View
from scheduler_svc.lanes.arriving import Arriving
from scheduler_svc.lanes.draft import Draft
from scheduler_svc.lanes.flights import Ran
from scheduler_svc.lanes.leaving import Leaving
from scheduler_svc.lanes.roster import Roster, SwappedGroup
from scheduler_svc.store.types import Commit, CommitReply, Joined, PrefixMatch


class Step:
    """Thrown away once its plan is built."""

    def __init__(
        self,
        draft: Draft,
        roster: Roster,
        limits: Limits,
        num_usable_blocks: int,
        stats: LaneStats,
    ) -> None:
        self.draft = draft
        self._roster = roster
        self._limits = limits
        self._num_usable_blocks = num_usable_blocks
        self._stats = stats
        self._leaving = Leaving(draft, roster, stats)
        self._decision: Decision[Sequence] = Decision()
        self._arriving = Arriving(draft, roster, self._decision, stats)

    @property
    def is_empty(self) -> bool:
        return self._decision.is_empty and self.draft.is_empty

    @property
    def makes_room(self) -> bool:
        """There may be some for others that was not there before."""
        return not (self._decision.only_decodes and self.draft.all_stay)

    def settle(self, failed: Iterable[Sequence]) -> None:
        """Has everybody leave who is over; `failed` ones had rows that failed."""
        self._leaving.settle(failed)

    def recall(self) -> None:
        """Has everybody give way: there is another worker for them."""
        self._leaving.recall()

    def decide(
        self, candidates: Iterable[tuple[Sequence, PrefixMatch]], num_rounds: int = 1
    ) -> None:
        """Asks the policy, and does what takes no block. `candidates` come with what the cache
        holds of them; `num_rounds` is how often decodes may run where nothing else does."""
        # Nobody passes a group or a sequence that is to come back and cannot yet, or goes back now.
        ready = list(takewhile(self._is_ready, self._roster.swapped))
        is_open = len(ready) == len(self._roster.swapped) and not self._is_recalling
        swapped = {Swapped(other.sequences, len(other.host_blocks)): other for other in ready}
        view = self._view(list(swapped), candidates if is_open else (), num_rounds)
        self._carry_out(schedule(self._limits, view), swapped)

    def try_alone(
        self, accused: Sequence, candidates: Iterable[tuple[Sequence, PrefixMatch]]
    ) -> None:
        """Runs one sequence with nobody beside it; the others keep their rows and blocks."""
        # While somebody is recalled, all that are assigned are given back.
        found = [pair for pair in candidates if pair[0] is accused]
        view = self._view([], () if self._is_recalling else found)
        running = [accused] if accused.row is not None else []
        num_others = len(view.running) - len(running)
        num_siblings = sum(len(group.siblings) for group in view.forkable)
        alone = replace(
            view,
            running=running,
            forkable=(),
            num_reserved_rows=view.num_reserved_rows + num_siblings + num_others,
        )
        self._carry_out(schedule(self._limits, alone), {})

    @property
    def _is_recalling(self) -> bool:
        return bool(self._roster.is_recalling or self.draft.recalled)

    def _carry_out(
        self, decision: Decision[Sequence], swapped: Mapping[Swapped[Sequence], SwappedGroup]
    ) -> None:
        self._decision = decision
        for forkable in decision.unforked:
            self._leaving.unfork(forkable.siblings[0].group)
        for sequence in decision.preempted:
            self._leaving.preempt(sequence)
        for sequences in decision.swapped_out:
            self._leaving.swap_out(sequences)
        for given_up in decision.given_up:
            self._leaving.give_up(swapped[given_up])
        self._arriving = Arriving(self.draft, self._roster, decision, self._stats)
        self._arriving.share_prefixes()
        self._schedule()

    def journal(self, fresh: Iterable[Sequence]) -> None:
        """Takes up the new tokens of these."""
        self.draft.journal(fresh)

    def commit(self) -> Commit:
        draft = self.draft
        return Commit(
            step=draft.number,
            withdrawals=draft.withdrawals,
            publications=draft.publications,
            runs=draft.runs,
            forgotten=draft.forgotten,
            shared_blocks=draft.shared,
            returned_blocks=draft.returned,
            taken_references=self._arriving.taken_references(),
            joined=[Joined(sibling.sequence_id, 0) for _, sibling in self._decision.forked],
            admissions=self._arriving.admissions(),
        )

    def apply(self, reply: CommitReply) -> Ran:
        """Hands the blocks out; the draft's changes are complete then."""
        draft = self.draft
        draft.changes.num_scheduled_tokens += self._decision.num_scheduled_tokens
        draft.changes.num_rounds = self._decision.num_rounds
        self._arriving.hand_out(reply)
        # Whoever came in this step has its row now.
        draft.changes.rows = _rows_of(draft.sequences)
        return Ran(draft.changes.rows, draft.sequences, _rows_of(draft.due), draft.due)

    def _is_ready(self, swapped: SwappedGroup) -> bool:
        """All of its tokens are known: it can be admitted again."""
        return swapped.last_step <= self._roster.landed_step

    def _view(
        self,
        swapped: list[Swapped[Sequence]],
        candidates: Iterable[tuple[Sequence, PrefixMatch]],
        num_rounds: int = 1,
    ) -> View[Sequence]:
        roster = self._roster
        parents = {group: _is_computed(group) for group in roster.parents}
        return View(
            running=list(roster.rows),
            num_free_blocks=self.draft.num_free_blocks,
            num_usable_blocks=self._num_usable_blocks,
            references=roster.rows.references,
            forkable=[_forkable(group) for group, computed in parents.items() if computed],
            swapped=swapped,
            num_free_host_blocks=roster.host_blocks.num_free,
            candidates=[self._candidate(*pair) for pair in candidates],
            num_reserved_rows=sum(
                len(group.siblings) for group, computed in parents.items() if not computed
            ),
            num_rounds=num_rounds,
        )

    def _candidate(self, sequence: Sequence, match: PrefixMatch) -> Candidate[Sequence]:
        return Candidate(
            sequence=sequence,
            # Whose prompt's log-probabilities are wanted is computed whole.
            block_hashes=() if sequence.computes_prompt else self.draft.hashes(sequence),
            num_hits=match.num_hits,
            num_free_hits=match.num_free_hits,
            num_rows=sequence.num_wanted_rows,
            is_new=not sequence.was_preempted,
        )

    def _schedule(self) -> None:
        """Running rows count this step's tokens as computed from here on."""
        draft, decision, number = self.draft, self._decision, self.draft.number
        decodes = decision.scheduled[: decision.num_decodes]
        if decision.num_rounds:
            self._schedule_rounds(decodes, decision.num_rounds)
            return
        # What `draft.compute` does, in short: this is the longest loop of a busy lane.
        for sequence in decodes:
            sequence.num_computed_tokens += 1
            sequence.num_tokens += 1
            sequence.last_step = number
        draft.sequences += decodes
        draft.due += decodes
        for sequence, num_tokens in zip(
            decision.scheduled[len(decodes) :],
            decision.num_scheduled_tokens[len(decodes) :],
            strict=True,
        ):
            draft.compute(sequence, num_tokens)
            draft.publish(sequence)

    def _schedule_rounds(self, decodes: list[Sequence], num_rounds: list[int]) -> None:
        draft, number = self.draft, self.draft.number
        for sequence, count in zip(decodes, num_rounds, strict=True):
            sequence.num_computed_tokens += count
            sequence.num_tokens += count
            sequence.last_step = number
        draft.sequences += decodes
        for done in range(max(num_rounds)):
            draft.due += [
                other for other, count in zip(decodes, num_rounds, strict=True) if count > done
            ]


def _is_computed(group: Group) -> bool:
    """Its prompt is, if the plans in flight are counted."""
    source = group.sequences[0]
    return group.hold is not None or (
        source.row is not None and source.num_computed_tokens >= source.num_prompt_tokens
    )


def _forkable(group: Group) -> Forkable[Sequence]:
    source = group.sequences[0] if group.hold is None else None
    return Forkable(list(group.siblings), source, group.hold)


def _rows_of(sequences: list[Sequence]) -> list[int]:
    return [sequence.row for sequence in sequences if sequence.row is not None]

"""One step of a lane, decided before anything is done: the policy's answer and its commit."""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.policy import (
    Admitted,
    Decision,
    Limits,
    Running,
    Waiting,
    blocks_for,
    blocks_to_the_end,
    schedule,
)
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.store.hashing import num_matchable_blocks
from scheduler_svc.store.types import (
    Admission,
    Append,
    Commit,
    Departure,
    PrefixMatch,
    Publication,
    TokenRun,
)


@dataclass(frozen=True, slots=True)
class Step:
    """The decision's indices count in `running` and `candidates`."""

    decision: Decision
    running: list[Sequence]
    candidates: list[Sequence]
    departing: list[Sequence]
    commit: Commit


@dataclass(frozen=True, slots=True)
class Planner:
    """Shows sequences to the policy and to the pool as each wants to see them."""

    limits: Limits
    enable_prefix_caching: bool

    def plan(
        self,
        number: int,
        rows: Iterable[Sequence],
        candidates: list[Sequence],
        matches: list[PrefixMatch],
        num_free_blocks: int,
    ) -> Step | None:
        """The next step; None if there is nothing to do. Running sequences count its tokens as
        computed from here on."""
        held = list(rows)
        departing = [sequence for sequence in held if sequence.leaving]
        running = [sequence for sequence in held if not sequence.leaving]
        decision = schedule(
            self.limits,
            [_running(sequence) for sequence in running],
            [self._waiting(*pair) for pair in zip(candidates, matches, strict=True)],
            num_free_blocks,
        )
        if not (departing or decision.scheduled or decision.admitted):
            return None
        for part in decision.scheduled:
            running[part.index].num_computed_tokens += part.num_scheduled_tokens
        commit = self._commit(number, decision, running, candidates, departing)
        return Step(decision, running, candidates, departing, commit)

    def to_the_end(self, sequence: Sequence) -> int:
        """Blocks that the sequence holds at its end."""
        return blocks_to_the_end(sequence.max_num_tokens, self.limits.block_size)

    def matchable(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Hashes of the blocks that may be hits."""
        num_blocks = num_matchable_blocks(len(sequence.token_ids), self.limits.block_size)
        return self._hashes(sequence)[:num_blocks]

    def _hashes(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Of its full blocks; without prefix caching there is nothing to share."""
        return sequence.hashes() if self.enable_prefix_caching else ()

    def _waiting(self, sequence: Sequence, match: PrefixMatch) -> Waiting:
        return Waiting(
            num_tokens=len(sequence.token_ids),
            max_num_tokens=sequence.max_num_tokens,
            block_hashes=self._hashes(sequence),
            num_hits=match.num_hits,
            num_free_hits=match.num_free_hits,
        )

    def _commit(
        self,
        number: int,
        decision: Decision,
        running: list[Sequence],
        candidates: list[Sequence],
        departing: list[Sequence],
    ) -> Commit:
        withdrawals = [block_id for gone in departing for block_id in gone.withdrawn_blocks]
        publications = [entry for sequence in running for entry in self._publish(sequence)]
        return Commit(
            step=number,
            withdrawals=tuple(withdrawals),
            publications=tuple(publications),
            runs=tuple(_run(other) for other in (*running, *departing) if other.unjournaled),
            departures=tuple(_departure(sequence) for sequence in departing),
            appends=tuple(
                Append(running[part.index].sequence_id, part.num_new_blocks)
                for part in decision.scheduled
                if part.num_new_blocks
            ),
            admissions=tuple(
                self._admission(candidates[entry.index], entry) for entry in decision.admitted
            ),
        )

    def _publish(self, sequence: Sequence) -> list[Publication]:
        """The blocks that are full, with known tokens, once the step being planned has run."""
        first = sequence.num_published_blocks
        num_known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        num_full = min(num_known // self.limits.block_size, len(sequence.block_ids))
        if num_full <= first:
            return []
        sequence.num_published_blocks = num_full
        hashes = self._hashes(sequence)[first:num_full]
        pairs = zip(sequence.block_ids[first:num_full], hashes, strict=False)
        return [Publication(*pair) for pair in pairs]

    def _admission(self, sequence: Sequence, entry: Admitted) -> Admission:
        block_size = self.limits.block_size
        hashes = self._hashes(sequence)
        num_filled = entry.num_hits + entry.num_scheduled_tokens // block_size
        return Admission(
            sequence_id=sequence.sequence_id,
            num_output_tokens=sequence.num_journaled,
            hit_hashes=hashes[: entry.num_hits],
            num_new_blocks=blocks_for(len(sequence.token_ids), block_size) - entry.num_hits,
            fill_hashes=hashes[entry.num_hits : num_filled],
        )


def _running(sequence: Sequence) -> Running:
    return Running(
        num_tokens=len(sequence.token_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        num_held_blocks=len(sequence.block_ids),
        max_num_tokens=sequence.max_num_tokens,
    )


def _run(sequence: Sequence) -> TokenRun:
    return TokenRun(sequence.sequence_id, sequence.num_journaled, tuple(sequence.unjournaled))


def _departure(sequence: Sequence) -> Departure:
    return Departure(sequence.sequence_id, tuple(sequence.block_ids))

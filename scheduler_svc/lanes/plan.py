"""A step as the message that a worker reads."""

from dataclasses import dataclass, field

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.sequence import Sequence, seed_of_choice


@dataclass(slots=True)
class Moves:
    """Whole blocks to move, in parallel."""

    sources: list[int] = field(default_factory=list)
    destinations: list[int] = field(default_factory=list)

    def add(self, source: int, destination: int) -> None:
        self.sources.append(source)
        self.destinations.append(destination)


@dataclass(slots=True)
class Changes:
    """What a step changes in the worker's tables, and what it runs."""

    released_rows: list[int] = field(default_factory=list)
    admissions: worker_pb2.Admissions = field(default_factory=worker_pb2.Admissions)
    appended: list[tuple[int, list[int]]] = field(default_factory=list)  # row, block ids
    swap_outs: Moves = field(default_factory=Moves)
    swap_ins: Moves = field(default_factory=Moves)
    copies: Moves = field(default_factory=Moves)
    rows: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    # How often each row runs, a token each time; once where there are no entries.
    num_rounds: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """All that are computed."""
        return sum(self.num_rounds) or sum(self.num_scheduled_tokens)

    @property
    def is_empty(self) -> bool:
        return not (
            self.released_rows or self.admissions.rows or self.rows or self.swap_outs.sources
        )

    def admit(self, sequence: Sequence) -> None:
        """Takes down the sequence with its row and block table, as it is before the step."""
        assert sequence.row is not None
        params, admissions = sequence.group.params, self.admissions
        admissions.rows.append(sequence.row)
        admissions.token_ids.extend(sequence.token_ids)
        admissions.num_tokens.append(len(sequence.token_ids))
        admissions.num_prompt_tokens.append(sequence.num_prompt_tokens)
        admissions.num_computed_tokens.append(sequence.num_computed_tokens)
        admissions.block_ids.extend(sequence.block_ids)
        admissions.num_blocks.append(len(sequence.block_ids))
        admissions.temperatures.append(params.temperature)
        admissions.top_ks.append(params.top_k)
        admissions.top_ps.append(params.top_p)
        admissions.min_ps.append(params.min_p)
        admissions.seeds.append(seed_of_choice(params.seed, sequence.choice))
        admissions.num_logprobs.append(params.num_logprobs)
        admissions.num_prompt_logprobs.append(0)


def build_plan(epoch: int, step: int, changes: Changes) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan(
        epoch=epoch,
        step=step,
        released_rows=changes.released_rows,
        schedule=worker_pb2.Schedule(
            rows=changes.rows,
            num_scheduled_tokens=changes.num_scheduled_tokens,
            num_rounds=changes.num_rounds,
        ),
    )
    if changes.admissions.rows:
        plan.admissions.CopyFrom(changes.admissions)
    for row, block_ids in changes.appended:
        plan.appends.rows.append(row)
        plan.appends.block_ids.extend(block_ids)
        plan.appends.num_blocks.append(len(block_ids))
    _move(plan.swap_outs, changes.swap_outs)
    _move(plan.swap_ins, changes.swap_ins)
    _move(plan.copies, changes.copies)
    return plan


def _move(message: worker_pb2.BlockMoves, moves: Moves) -> None:
    if moves.sources:
        message.sources.extend(moves.sources)
        message.destinations.extend(moves.destinations)

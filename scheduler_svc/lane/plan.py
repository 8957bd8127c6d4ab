"""Builds the message that a worker executes in one step."""

from dataclasses import dataclass, field

from quire.internal.v1 import worker_pb2
from scheduler_svc.core.request import seed_of_choice
from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class BlockMoves:
    """Whole blocks to copy; sources and destinations in parallel."""

    sources: list[int] = field(default_factory=list)
    destinations: list[int] = field(default_factory=list)

    def add(self, source: int, destination: int) -> None:
        self.sources.append(source)
        self.destinations.append(destination)


@dataclass(slots=True)
class PlanContents:
    """Changes of one step to the worker's tables, and the rows it runs."""

    released_rows: list[int] = field(default_factory=list)
    # All sequences that get a row: new, forked and swapped in.
    admissions: worker_pb2.Admissions = field(default_factory=worker_pb2.Admissions)
    appended: list[tuple[int, list[int]]] = field(default_factory=list)  # row, block ids
    swap_outs: BlockMoves = field(default_factory=BlockMoves)
    swap_ins: BlockMoves = field(default_factory=BlockMoves)
    copies: BlockMoves = field(default_factory=BlockMoves)
    rows: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    # Rounds of each row, one token per round; empty: one round each.
    num_rounds: list[int] = field(default_factory=list)
    # Per row; empty: none has any.
    num_lookahead_tokens: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(self.num_rounds) or sum(self.num_scheduled_tokens)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of prompt tokens, without the last tokens of some prompts: a row with one token
        counts as a decode."""
        return 0 if self.num_rounds else self.num_tokens - self.num_scheduled_tokens.count(1)

    @property
    def is_empty(self) -> bool:
        return not (
            self.released_rows or self.admissions.rows or self.rows or self.swap_outs.sources
        )

    def admit(self, sequence: Sequence) -> None:
        """Add an admission: the sequence with its row and block table before the step."""
        assert sequence.row is not None
        params, admissions = sequence.group.params, self.admissions
        admissions.rows.append(sequence.row)
        admissions.token_ids.extend(sequence.token_ids)
        admissions.num_tokens.append(len(sequence.token_ids))
        admissions.num_prompt_tokens.append(sequence.num_prompt_tokens)
        admissions.num_computed_tokens.append(sequence.num_written_tokens)
        admissions.block_ids.extend(sequence.block_ids)
        admissions.num_blocks.append(len(sequence.block_ids))
        admissions.temperatures.append(params.temperature)
        admissions.top_ks.append(params.top_k)
        admissions.top_ps.append(params.top_p)
        admissions.min_ps.append(params.min_p)
        # All beams of a search have one seed: which of them has which row does not matter.
        choice = 0 if sequence.is_beam else sequence.choice
        admissions.seeds.append(seed_of_choice(params.seed, choice))
        admissions.num_logprobs.append(params.num_logprobs)
        admissions.num_prompt_logprobs.append(sequence.num_wanted_prompt_logprobs)
        if params.logits_params or admissions.logits_params:
            num_missing = len(admissions.rows) - 1 - len(admissions.logits_params)
            admissions.logits_params.extend([*[b""] * num_missing, params.logits_params])
        if params.without_drafts:
            admissions.rows_without_drafts.append(sequence.row)


def build_plan(epoch: int, step: int, contents: PlanContents) -> worker_pb2.BatchPlan:
    plan = worker_pb2.BatchPlan(
        epoch=epoch,
        step=step,
        released_rows=contents.released_rows,
        schedule=worker_pb2.Schedule(
            rows=contents.rows,
            num_scheduled_tokens=contents.num_scheduled_tokens,
            num_rounds=contents.num_rounds,
            num_lookahead_tokens=contents.num_lookahead_tokens,
        ),
    )
    if contents.admissions.rows:
        plan.admissions.CopyFrom(contents.admissions)
    for row, block_ids in contents.appended:
        plan.appends.rows.append(row)
        plan.appends.block_ids.extend(block_ids)
        plan.appends.num_blocks.append(len(block_ids))
    _move(plan.swap_outs, contents.swap_outs)
    _move(plan.swap_ins, contents.swap_ins)
    _move(plan.copies, contents.copies)
    return plan


def _move(message: worker_pb2.BlockMoves, moves: BlockMoves) -> None:
    if moves.sources:
        message.sources.extend(moves.sources)
        message.destinations.extend(moves.destinations)

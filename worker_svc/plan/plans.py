"""Plans and results as the worker's own types, and their conversion from and to protos."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import add
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from quire.internal.v1 import worker_pb2
from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import Ints
from worker_svc.plan.logits_params import LogitsParams
from worker_svc.plan.logprobs import Logprobs
from worker_svc.plan.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True)
class Admission:
    """A sequence that gets a row."""

    row: int
    token_ids: Ints
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Ints
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_logprobs: int  # 0 none, k + 1 for the chosen token and the top k
    num_prompt_logprobs: int  # the same for prompt tokens
    logits_params: LogitsParams | None = None  # None: nothing changes the logits
    without_drafts: bool = False  # no draft tokens are proposed


@dataclass(frozen=True)
class BlockAppends:
    """Blocks to append to the tables of rows. A row is there once."""

    rows: Ints
    num_blocks: Ints  # one per row
    block_ids: Ints  # of all rows, one row after the other

    @classmethod
    def of_row(cls, row: int, block_ids: Ints) -> "BlockAppends":
        return cls(np.array([row]), np.array([len(block_ids)]), block_ids)


@dataclass(frozen=True)
class BlockMoves:
    """Whole blocks, each from a source to the destination at the same index."""

    sources: Ints
    destinations: Ints


# The message has one packed array per scalar field of an admission.
_COLUMNS: Final = {
    "row": "rows",
    "num_prompt_tokens": "num_prompt_tokens",
    "num_computed_tokens": "num_computed_tokens",
    "temperature": "temperatures",
    "top_k": "top_ks",
    "top_p": "top_ps",
    "min_p": "min_ps",
    "seed": "seeds",
    "num_logprobs": "num_logprobs",
    "num_prompt_logprobs": "num_prompt_logprobs",
}
_NOTHING: Final[Ints] = np.empty(0, np.int64)
NO_APPENDS: Final = BlockAppends(_NOTHING, _NOTHING, _NOTHING)
_NO_MOVES: Final = BlockMoves(_NOTHING, _NOTHING)


@dataclass(frozen=True)
class Plan:
    """One step."""

    epoch: int
    step: int
    released_rows: Ints
    admissions: tuple[Admission, ...]
    appends: BlockAppends
    swap_outs: BlockMoves
    swap_ins: BlockMoves
    copies: BlockMoves
    rows: Ints  # scheduled
    num_scheduled_tokens: Ints  # one per scheduled row
    num_rounds: Ints = field(default_factory=lambda: _NOTHING)  # one per scheduled row, or none
    num_lookahead_tokens: Ints = field(default_factory=lambda: _NOTHING)  # the same
    round: int = 0  # the index of this part in a plan of several rounds
    is_one_of_rounds: bool = False  # whether it is such a part
    arrived_ns: int = field(default_factory=time.monotonic_ns, compare=False)

    @property
    def moves_blocks(self) -> bool:
        return any(len(moves.sources) for moves in (self.swap_outs, self.swap_ins, self.copies))

    def rounds(self) -> Iterator["Plan"]:
        """This plan, split into plans of one round each."""
        most = int(self.num_rounds.max(initial=0))
        yield replace(self, num_rounds=_NOTHING, is_one_of_rounds=most > 1)
        for done in range(1, most):
            running = self.num_rounds > done
            rows, lookahead = self.rows[running], self.num_lookahead_tokens
            yield Plan(
                epoch=self.epoch,
                step=self.step,
                released_rows=_NOTHING,
                admissions=(),
                appends=NO_APPENDS,
                swap_outs=_NO_MOVES,
                swap_ins=_NO_MOVES,
                copies=_NO_MOVES,
                rows=rows,
                num_scheduled_tokens=np.ones_like(rows),
                num_lookahead_tokens=lookahead[running] if len(lookahead) else lookahead,
                round=done,
                is_one_of_rounds=True,
                arrived_ns=self.arrived_ns,
            )


@dataclass(frozen=True)
class StepTimes:
    """The duration of a step by phase."""

    waiting_ns: int = 0
    preparing_ns: int = 0
    forward_ns: int = 0
    sampling_ns: int = 0
    starting_ns: int = 0  # the part of `waiting_ns` after the plan had arrived

    def __add__(self, other: "StepTimes") -> "StepTimes":
        return StepTimes(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class StepOutput:
    """The result of a plan."""

    sampled_rows: list[int]
    sampled_token_ids: list[int]
    times: StepTimes
    logprobs: Logprobs | None = None  # None where no sampled row requests any
    failures: dict[int, RowFailure] = field(default_factory=dict)  # by row
    prompt_logprobs: PromptLogprobs | None = None  # None where no row computed any
    # Scheduled rows with look-ahead, and how many of their tokens are computed.
    lookahead_rows: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    forced_indices: list[int] = field(default_factory=list)  # of jumps, among the sampled tokens
    round_sizes: list[int] = field(default_factory=list)  # sampled tokens by round, if several
    # By position behind a row's last token.
    num_draft_tokens: list[int] = field(default_factory=list)
    num_accepted_tokens: list[int] = field(default_factory=list)  # of the drafts


class PlanError(ValueError):
    """A plan that contradicts itself or the worker's state."""


def plan_from_proto(message: worker_pb2.BatchPlan) -> Plan:
    """PlanError where parallel arrays differ in length."""
    scheduled = message.schedule
    plan = Plan(
        epoch=message.epoch,
        step=message.step,
        released_rows=_ints(message.released_rows),
        admissions=_admissions(message),
        appends=_appends(message),
        swap_outs=_moves(message, "swap_outs"),
        swap_ins=_moves(message, "swap_ins"),
        copies=_moves(message, "copies"),
        rows=_ints(scheduled.rows),
        num_scheduled_tokens=_ints(scheduled.num_scheduled_tokens),
        num_rounds=_ints(scheduled.num_rounds),
        num_lookahead_tokens=_ints(scheduled.num_lookahead_tokens),
    )
    _require_parallel("schedule", plan.rows, plan.num_scheduled_tokens)
    if len(plan.num_rounds):
        _require_parallel("rounds", plan.rows, plan.num_rounds)
        if plan.num_rounds.min() < 1:
            raise PlanError("a scheduled row must run in one round at least")
    if len(plan.num_lookahead_tokens):
        _require_parallel("look-ahead", plan.rows, plan.num_lookahead_tokens)
    return plan


def plan_to_proto(plan: Plan) -> worker_pb2.BatchPlan:
    """The inverse of `plan_from_proto`."""
    message = worker_pb2.BatchPlan(
        epoch=plan.epoch, step=plan.step, released_rows=plan.released_rows
    )
    for admission in plan.admissions:
        _add_admission(message.admissions, admission)
    if len(plan.appends.rows):
        message.appends.rows.extend(plan.appends.rows)
        message.appends.num_blocks.extend(plan.appends.num_blocks)
        message.appends.block_ids.extend(plan.appends.block_ids)
    for name in ("swap_outs", "swap_ins", "copies"):
        moves: BlockMoves = getattr(plan, name)
        if len(moves.sources):
            getattr(message, name).sources.extend(moves.sources)
            getattr(message, name).destinations.extend(moves.destinations)
    message.schedule.rows.extend(plan.rows)
    message.schedule.num_scheduled_tokens.extend(plan.num_scheduled_tokens)
    message.schedule.num_rounds.extend(plan.num_rounds)
    message.schedule.num_lookahead_tokens.extend(plan.num_lookahead_tokens)
    return message


def result_to_proto(plan: Plan, output: StepOutput) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        epoch=plan.epoch,
        step=plan.step,
        sampled_rows=output.sampled_rows,
        sampled_token_ids=output.sampled_token_ids,
        logprobs=None if output.logprobs is None else output.logprobs.to_proto(),
        failures=[failure.to_proto(row) for row, failure in output.failures.items()],
        times=worker_pb2.StepTimes(**vars(output.times)),
        prompt_logprobs=(
            None if output.prompt_logprobs is None else output.prompt_logprobs.to_proto()
        ),
        lookahead_rows=output.lookahead_rows,
        num_computed_tokens=output.num_computed_tokens,
        forced_indices=output.forced_indices,
        round_sizes=output.round_sizes,
        num_draft_tokens=output.num_draft_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
    )


def _admissions(plan: worker_pb2.BatchPlan) -> tuple[Admission, ...]:
    # Most plans have none, and reading an absent message would cost time.
    if not plan.HasField("admissions"):
        return ()
    message = plan.admissions
    columns = {name: getattr(message, column) for name, column in _COLUMNS.items()}
    counts = (message.num_tokens, message.num_blocks)
    _require_parallel("admissions", *columns.values(), *counts)
    token_ids = _split(message.token_ids, message.num_tokens)
    block_ids = _split(message.block_ids, message.num_blocks)
    logits_params = message.logits_params or [b""] * len(message.rows)
    _require_parallel("admissions", message.rows, logits_params)
    without_drafts = {*message.rows_without_drafts}
    return tuple(
        Admission(
            token_ids=token_ids[i],
            block_ids=block_ids[i],
            logits_params=_logits_params(logits_params[i]),
            without_drafts=message.rows[i] in without_drafts,
            **{name: column[i] for name, column in columns.items()},
        )
        for i in range(len(message.rows))
    )


def _add_admission(message: worker_pb2.Admissions, admission: Admission) -> None:
    for name, column in _COLUMNS.items():
        getattr(message, column).append(getattr(admission, name))
    message.token_ids.extend(admission.token_ids)
    message.num_tokens.append(len(admission.token_ids))
    message.block_ids.extend(admission.block_ids)
    message.num_blocks.append(len(admission.block_ids))
    params = admission.logits_params
    if params is not None or message.logits_params:
        num_missing = len(message.rows) - 1 - len(message.logits_params)
        data = b"" if params is None else params.to_bytes()
        message.logits_params.extend([*[b""] * num_missing, data])
    if admission.without_drafts:
        message.rows_without_drafts.append(admission.row)


def _logits_params(data: bytes) -> LogitsParams | None:
    if not data:
        return None
    try:
        return LogitsParams.from_bytes(data)
    except ValueError as error:
        raise PlanError(f"logits_params: {error}") from error


def _appends(plan: worker_pb2.BatchPlan) -> BlockAppends:
    if not plan.HasField("appends"):
        return NO_APPENDS
    message = plan.appends
    _require_parallel("appends", message.rows, message.num_blocks)
    _require_sum(message.num_blocks, message.block_ids)
    return BlockAppends(_ints(message.rows), _ints(message.num_blocks), _ints(message.block_ids))


def _moves(
    plan: worker_pb2.BatchPlan, name: Literal["swap_outs", "swap_ins", "copies"]
) -> BlockMoves:
    if not plan.HasField(name):
        return _NO_MOVES
    message: worker_pb2.BlockMoves = getattr(plan, name)
    _require_parallel("moves", message.sources, message.destinations)
    return BlockMoves(_ints(message.sources), _ints(message.destinations))


def _split(values: Sequence[int], counts: Sequence[int]) -> list[NDArray[np.int64]]:
    """Cut a concatenation; PlanError if the counts do not add up to its length."""
    _require_sum(counts, values)
    array, ends = _ints(values), list(accumulate(counts, initial=0))
    return [array[first:end] for first, end in pairwise(ends)]


def _require_sum(counts: Sequence[int], values: Sequence[int]) -> None:
    if sum(counts) != len(values):
        raise PlanError(f"{len(values)} values, but their counts add up to {sum(counts)}")


def _require_parallel(what: str, *arrays: Sequence[object] | Ints) -> None:
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise PlanError(f"{what}: parallel arrays of lengths {lengths}")


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)

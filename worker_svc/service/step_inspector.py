"""Replays a recording's plans on the tables alone, to explain the inputs of a step."""

from dataclasses import fields
from itertools import islice

from quire.internal.v1 import worker_pb2
from worker_svc.plan.failures import RowFailure
from worker_svc.plan.inputs import Ints, StepInputs
from worker_svc.plan.plans import Plan, PlanError, plan_from_proto
from worker_svc.plan.tables import RowTables

# Limits of the token table, and of a step's arrays, to reject a corrupt geometry.
_MOST_TOKENS, _MOST_BATCHED = 2**30, 2**20


class StepInspector:
    """Tables after the entries of a recording. PlanError for an invalid entry."""

    def __init__(self) -> None:
        self._tables: RowTables | None = None
        self._step: worker_pb2.ExplainedStep | None = None

    def add(self, entry: worker_pb2.Recording) -> None:
        """Apply the next entry; the first one is `hello`."""
        kind = entry.WhichOneof("entry")
        if kind == "hello":
            self._tables = _tables(entry.hello)
        elif kind == "plan":
            self._plan(plan_from_proto(entry.plan))
        elif kind == "result":
            self._result(entry.result)
        elif kind == "rows_cleared":
            self._started_tables.clear()

    def step(self) -> worker_pb2.ExplainedStep:
        """The step of the last plan, or the first round of it."""
        if self._step is None:
            raise PlanError("no plan to explain")
        return self._step

    @property
    def _started_tables(self) -> RowTables:
        if self._tables is None:
            raise PlanError("a recording begins with `hello`")
        return self._tables

    def _plan(self, plan: Plan) -> None:
        tables = self._started_tables
        tables.apply(plan)
        rows, counts, _ = tables.runnable(plan)
        inputs = tables.prepare(rows, counts)
        self._step = _explained(tables, rows, counts, inputs)
        tables.advance(rows, inputs.seq_lens)
        for part in islice(plan.rounds(), 1, None):
            # The tokens of later rounds are in the result.
            more, _, _ = tables.without_failed(part)
            tables.advance(more, tables.num_computed_tokens[more] + 1)

    def _result(self, result: worker_pb2.StepResult) -> None:
        for row, token in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            self._started_tables.append_token(row, token)
        counts = zip(result.lookahead_rows, result.num_computed_tokens, strict=True)
        for row, num_computed in counts:
            self._started_tables.set_num_computed(row, num_computed)
        for failure in result.failures:
            self._started_tables.fail(failure.row, RowFailure(failure.reason))


def _tables(hello: worker_pb2.Hello) -> RowTables:
    is_possible = (
        hello.block_size >= 1
        and hello.max_num_seqs * hello.max_model_len <= _MOST_TOKENS
        and max(hello.max_num_seqs, hello.max_num_batched_tokens) <= _MOST_BATCHED
    )
    if not is_possible:
        raise PlanError("the geometry in `hello` is not that of a worker")
    return RowTables(
        max_num_seqs=hello.max_num_seqs,
        max_model_len=hello.max_model_len,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        max_num_batched_tokens=hello.max_num_batched_tokens,
    )


def _explained(
    tables: RowTables, rows: Ints, counts: Ints, inputs: StepInputs
) -> worker_pb2.ExplainedStep:
    num_tokens, num_blocks = tables.num_tokens[rows], tables.num_blocks[rows]
    names = [field.name for field in fields(inputs) if field.name != "sampling_mask"]
    arrays = {name: getattr(inputs, name) for name in names}
    step = worker_pb2.ExplainedStep(
        rows=rows,
        num_scheduled_tokens=counts,
        num_computed_tokens=tables.num_computed_tokens[rows],
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        **arrays,
        logits_indices=inputs.logits_indices,
    )
    for row, length, blocks in zip(rows, num_tokens, num_blocks, strict=True):
        step.token_ids.extend(tables.token_table[row, :length].tolist())
        step.block_ids.extend(tables.block_table[row, :blocks].tolist())
    return step

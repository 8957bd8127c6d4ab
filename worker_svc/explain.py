"""What a recorded step looks like: the tables replayed on their own, without device or lane."""

from itertools import islice

from quire.internal.v1 import worker_pb2
from worker_svc.inputs import Ints, StepInputs
from worker_svc.plans import Plan, PlanError, plan_from_proto
from worker_svc.tables import Tables

# Entries of the token table; a geometry beyond that is a mistake.
_MOST_TOKENS = 2**30


class Explanation:
    """Tables as the entries of a recording leave them; PlanError for entries that cannot be."""

    def __init__(self) -> None:
        self._tables: Tables | None = None
        self._step: worker_pb2.ExplainedStep | None = None

    def add(self, entry: worker_pb2.Recording) -> None:
        """The next entry, of which `hello` is the first."""
        kind = entry.WhichOneof("entry")
        if kind == "hello":
            self._tables = _tables(entry.hello)
        elif kind == "plan":
            self._plan(plan_from_proto(entry.plan))
        elif kind == "result":
            self._result(entry.result)
        elif kind == "rows_cleared":
            self._known.clear()

    def step(self) -> worker_pb2.ExplainedStep:
        """The step of the last plan; its first round, where it has several."""
        if self._step is None:
            raise PlanError("no plan to explain")
        return self._step

    @property
    def _known(self) -> Tables:
        if self._tables is None:
            raise PlanError("a recording begins with `hello`")
        return self._tables

    def _plan(self, plan: Plan) -> None:
        tables = self._known
        tables.apply(plan)
        rows, counts, _ = tables.without_failed(plan)
        inputs = tables.prepare(rows, counts)
        self._step = _explained(tables, rows, counts, inputs)
        tables.advance(rows, inputs.seq_lens)
        for part in islice(plan.rounds(), 1, None):
            # Their tokens come with the result.
            more, _, _ = tables.without_failed(part)
            tables.advance(more, tables.num_computed_tokens[more] + 1)

    def _result(self, result: worker_pb2.StepResult) -> None:
        for row, token in zip(result.sampled_rows, result.sampled_token_ids, strict=True):
            self._known.append_token(row, token)
        for failure in result.failures:
            self._known.fail(failure.row, failure.reason)


def _tables(hello: worker_pb2.Hello) -> Tables:
    if hello.block_size < 1 or hello.max_num_seqs * hello.max_model_len > _MOST_TOKENS:
        raise PlanError("a geometry that no worker has")
    return Tables(
        max_num_seqs=hello.max_num_seqs,
        max_model_len=hello.max_model_len,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        max_num_batched_tokens=hello.max_num_batched_tokens,
    )


def _explained(
    tables: Tables, rows: Ints, counts: Ints, inputs: StepInputs
) -> worker_pb2.ExplainedStep:
    num_tokens, num_blocks = tables.num_tokens[rows], tables.num_blocks[rows]
    step = worker_pb2.ExplainedStep(
        rows=rows,
        num_scheduled_tokens=counts,
        num_computed_tokens=tables.num_computed_tokens[rows],
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        request_indices=inputs.request_indices,
        positions=inputs.positions,
        token_indices=inputs.token_indices,
        input_ids=inputs.input_ids,
        block_table_indices=inputs.block_table_indices,
        block_numbers=inputs.block_numbers,
        block_offsets=inputs.block_offsets,
        slot_mapping=inputs.slot_mapping,
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        logits_indices=inputs.logits_indices,
    )
    for row, length, blocks in zip(rows, num_tokens, num_blocks, strict=True):
        step.token_ids.extend(tables.token_table[row, :length].tolist())
        step.block_ids.extend(tables.block_table[row, :blocks].tolist())
    return step

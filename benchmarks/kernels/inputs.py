"""Input preparation: the index arithmetic before each step, on one core."""

from dataclasses import dataclass, fields

import numpy as np

from benchmarks.kernels.limits import Limits
from benchmarks.kernels.timing import best_seconds
from benchmarks.report import Cell, Column, Part, Target
from worker_svc.plan.inputs import InputBuffers, Ints, StepInputs, prepare_inputs

_NUM_ROWS, _MAX_MODEL_LEN, _BLOCK_SIZE = 256, 2048, 16
_CHUNK = 64
_ROUNDS = 200
_MOST_MS = 0.3

Row = dict[str, Cell]


def inputs(limits: Limits) -> Part:
    steps = {
        "all decode": np.ones(_NUM_ROWS, np.int64),
        f"one in eight prefills {_CHUNK} tokens": np.where(
            np.arange(_NUM_ROWS) % 8 == 0, _CHUNK, 1
        ),
    }
    taken = {what: _prepared(num_scheduled) for what, num_scheduled in steps.items()}
    rows: list[Row] = [
        {"what": what, "tokens": t.num_tokens, "ms": t.ms, "kb": t.num_bytes / 1e3}
        for what, t in taken.items()
    ]
    slowest = max(t.ms for t in taken.values())
    return Part(
        name="inputs",
        title="Input preparation",
        notes=[
            f"A step of {_NUM_ROWS} rows in blocks of {_BLOCK_SIZE} tokens, on one thread. *KB* "
            "are the resulting arrays. The tables fit into a CPU cache, so there is no comparison "
            "with the memory bandwidth."
        ],
        columns=[
            Column("what", "step"),
            Column("tokens", "tokens", "d"),
            Column("ms", "ms", ".3f"),
            Column("kb", "KB", ".0f"),
        ],
        rows=rows,
        targets=[
            Target(
                f"ms at {_NUM_ROWS} rows",
                f"under {_MOST_MS}",
                f"{slowest:.3f}",
                slowest < _MOST_MS,
            )
        ],
    )


@dataclass(frozen=True)
class _Prepared:
    """Time and size of the inputs of one step."""

    ms: float
    num_tokens: int
    num_bytes: int


def _prepared(num_scheduled: Ints) -> _Prepared:
    draw = np.random.default_rng(0)
    rows = draw.permutation(_NUM_ROWS)
    num_computed = draw.integers(0, _MAX_MODEL_LEN - _CHUNK, _NUM_ROWS)
    num_tokens = num_computed + num_scheduled
    token_table = draw.integers(0, 32_000, (_NUM_ROWS, _MAX_MODEL_LEN)).astype(np.int32)
    blocks_per_row = _MAX_MODEL_LEN // _BLOCK_SIZE
    block_table = draw.permutation(_NUM_ROWS * blocks_per_row).astype(np.int32)
    block_table = block_table.reshape(_NUM_ROWS, blocks_per_row)
    buffers = InputBuffers(_NUM_ROWS, int(num_scheduled.sum()))

    def prepare() -> StepInputs:
        return prepare_inputs(
            rows,
            num_scheduled,
            num_computed,
            num_tokens,
            token_table,
            block_table,
            _BLOCK_SIZE,
            buffers,
        )

    ms = 1000 * best_seconds({"ours": prepare}, _ROUNDS)["ours"]
    step = prepare()
    return _Prepared(ms, step.num_tokens, sum(getattr(step, f.name).nbytes for f in fields(step)))

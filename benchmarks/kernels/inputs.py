"""Input preparation: index arithmetic before every step, on one core."""

import numpy as np

from benchmarks.kernels.limits import Limits
from benchmarks.kernels.timing import best_seconds
from benchmarks.report import Cell, Column, Part, Target
from worker_svc.inputs import InputBuffers, Ints, prepare_inputs

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
    ms = {what: _milliseconds(num_scheduled) for what, num_scheduled in steps.items()}
    rows: list[Row] = [
        {"what": what, "tokens": int(num_scheduled.sum()), "ms": ms[what]}
        for what, num_scheduled in steps.items()
    ]
    slowest = max(ms.values())
    return Part(
        name="inputs",
        title="Input preparation",
        notes=[f"A step of {_NUM_ROWS} rows in blocks of {_BLOCK_SIZE} tokens, by one thread."],
        columns=[
            Column("what", "step"),
            Column("tokens", "tokens", "d"),
            Column("ms", "ms", ".3f"),
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


def _milliseconds(num_scheduled: Ints) -> float:
    draw = np.random.default_rng(0)
    rows = draw.permutation(_NUM_ROWS)
    num_computed = draw.integers(0, _MAX_MODEL_LEN - _CHUNK, _NUM_ROWS)
    num_tokens = num_computed + num_scheduled
    token_table = draw.integers(0, 32_000, (_NUM_ROWS, _MAX_MODEL_LEN)).astype(np.int32)
    blocks_per_row = _MAX_MODEL_LEN // _BLOCK_SIZE
    block_table = draw.permutation(_NUM_ROWS * blocks_per_row).astype(np.int32)
    block_table = block_table.reshape(_NUM_ROWS, blocks_per_row)
    buffers = InputBuffers(_NUM_ROWS, int(num_scheduled.sum()))

    def prepare() -> object:
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

    return 1000 * best_seconds({"ours": prepare}, _ROUNDS)["ours"]

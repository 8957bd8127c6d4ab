"""Attention: decode, limited by memory bandwidth, and prefill, limited by compute."""

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.kernels.limits import Limits
from benchmarks.kernels.paged import DenseTensors, PagedTensors, Shape
from benchmarks.kernels.timing import best_seconds
from benchmarks.report import Cell, Column, Part, Target

_SEQ_LEN = 1024
# Of short conversations.
_DECODED_LEN = 180
_ROUNDS, _FEW_ROUNDS = 20, 5
# Torch has no attention over 8-bit formats: no comparison for these.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.bfloat16, torch.float16, *_FP8)

Row = dict[str, Cell]


def decode(limits: Limits) -> Part:
    """Measure attention with one query per sequence."""

    def enough(seq_len: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
        """Return the number of sequences that fill the working set."""
        return limits.enough(2 * seq_len * num_kv_heads * head_dim * itemsize)

    first = Shape(enough(_SEQ_LEN, 4, 64, 4), _SEQ_LEN, 1)
    others = [
        Shape(1, enough(1, 4, 64, 4), 1),
        Shape(enough(_SEQ_LEN, 8, 128, 4), _SEQ_LEN, 1, 32, 8, 128),
        *(Shape(enough(_SEQ_LEN, 4, 64, d.itemsize), _SEQ_LEN, 1, dtype=d) for d in _DTYPES),
        *(
            Shape(
                enough(_DECODED_LEN, 8, 128, 2), _DECODED_LEN, 1, 8 * group, 8, 128, torch.bfloat16
            )
            for group in (1, 2, 4, 8)
        ),
    ]
    rows = [_decode_row(limits, shape) for shape in (first, *others)]
    return Part(
        name="decode",
        title="Attention of decoded tokens",
        notes=[
            "Sequences x length. *MB* are keys and values, read once. *Of limit* is their rate as "
            "a share of the rate at which a sum over an array is read by the same threads. "
            "*Gather* is torch's attention including a gather of the blocks, *contiguous* "
            "the same on contiguous keys and values, both in the dtype of the cache: their times "
            "over that of the kernel. Torch has no attention over 8-bit formats."
        ],
        columns=[
            *_COLUMNS,
            Column("mb", "MB", ".0f"),
            Column("gbs", "GB/s", ".1f"),
            *_LIMIT,
            *_GATHER,
            *_CONTIGUOUS,
        ],
        rows=rows,
        targets=[
            _target("speed-up over gather", 3.0, rows[0]["of_gather"]),
            _target("speed-up over contiguous", 0.8, rows[0]["of_contiguous"]),
            _target("share of the bandwidth", 0.7, rows[0]["of_limit"]),
        ],
    )


def _decode_row(limits: Limits, shape: Shape) -> Row:
    paged = PagedTensors(shape)
    functions: dict[str, Callable[[], object]] = {"ours": paged.attend, "limit": limits.read}
    if shape.dtype not in _FP8:
        functions["contiguous"] = DenseTensors(shape).attend
        functions["gather"] = paged.gather_and_attend
    seconds = best_seconds(functions, _ROUNDS)
    rate = shape.read_bytes / seconds["ours"] / 1e9
    return {
        **_row(shape, seconds),
        "mb": shape.read_bytes / 1e6,
        "gbs": rate,
        "of_limit": rate / limits.gigabytes_per_s(seconds["limit"]),
    }


def prefill(limits: Limits) -> Part:
    """Measure attention of whole prompts."""
    sizes = [_SEQ_LEN, 160]
    # Queries, outputs, keys and values.
    token_bytes = 2 * (8 + 4) * 64 * 4
    shapes = [Shape(limits.enough(length * token_bytes), length, length) for length in sizes]
    # More than six times as large, per token.
    shapes.append(Shape(-(-shapes[0].num_seqs // 4), _SEQ_LEN, _SEQ_LEN, 32, 8, 128))
    shapes.extend(replace(shape, dtype=torch.bfloat16) for shape in shapes[1:])
    rows = [_prefill_row(limits, shape) for shape in shapes]
    return Part(
        name="prefill",
        title="Attention of whole prompts",
        notes=[
            "Prompts x length. *GFLOP* exclude masked keys. *Of limit* is their rate as a share of "
            "that of torch's product of large matrices of the same type. *Contiguous* as above."
        ],
        columns=[
            *_COLUMNS,
            Column("gflop", "GFLOP", ".1f"),
            Column("gflops", "GFLOP/s", ".0f"),
            *_LIMIT,
            *_CONTIGUOUS,
        ],
        rows=rows,
        targets=[_target("speed-up over contiguous", 0.9, rows[0]["of_contiguous"])],
    )


def _prefill_row(limits: Limits, shape: Shape) -> Row:
    functions = {"ours": PagedTensors(shape).attend, "contiguous": DenseTensors(shape).attend}
    seconds = best_seconds(functions, _FEW_ROUNDS)
    rate = shape.flops / seconds["ours"] / 1e9
    return {
        **_row(shape, seconds),
        "gflop": shape.flops / 1e9,
        "gflops": rate,
        "of_limit": rate / limits.gigaflops(shape.dtype),
    }


def _row(shape: Shape, seconds: dict[str, float]) -> Row:
    ratios = {f"of_{name}": s / seconds["ours"] for name, s in seconds.items() if name != "limit"}
    return {"shape": shape.title, "ms": 1000 * seconds["ours"], **ratios}


def _target(what: str, aim: float, measured: Cell) -> Target:
    assert isinstance(measured, float)
    return Target(what, f"at least {aim}", f"{measured:.2f}", measured >= aim)


_COLUMNS = [Column("shape", "batch"), Column("ms", "ms", ".2f")]
_LIMIT = [Column("of_limit", "of limit", ".2f")]
_GATHER = [Column("of_gather", "gather", ".2f")]
_CONTIGUOUS = [Column("of_contiguous", "contiguous", ".2f")]

"""Root-mean-square norms in Triton: a program has whole rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.fused.rows import dense_rows
from kernels.gpu.fused.tiles import norm_tile


def rms_norm_triton(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `kernels.fused.rms_norm`, of at most MOST_NORM_NUMBERS per row."""
    out = torch.empty_like(states, memory_format=torch.contiguous_format)
    _launch(states, None, weight, epsilon, None, out)
    return out


def add_rms_norm_triton(
    states: Tensor, added: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """As `kernels.fused.add_rms_norm`, of at most MOST_NORM_NUMBERS per row."""
    total = torch.empty_like(states, memory_format=torch.contiguous_format)
    out = torch.empty_like(total)
    _launch(states, added, weight, epsilon, total, out)
    return total, out


def _launch(
    states: Tensor,
    added: Tensor | None,
    weight: Tensor,
    epsilon: float,
    total: Tensor | None,
    out: Tensor,
) -> None:
    dim = states.shape[-1]
    if len(weight) != dim or (added is not None and added.shape != states.shape):
        raise ValueError(f"states {tuple(states.shape)} must be as long as the weight "
                         f"({len(weight)}) and of the shape of what is added")  # fmt: skip
    num_rows = out.numel() // max(dim, 1)
    if num_rows == 0:
        return
    rows, row_stride = dense_rows(states)
    more, more_stride = (None, 0) if added is None else dense_rows(added)
    tile = norm_tile(dim)
    rms_norm_kernel[(triton.cdiv(num_rows, tile.rows),)](
        rows,
        more,
        weight,
        total,
        out,
        num_rows,
        row_stride,
        more_stride,
        epsilon,
        DIM=dim,
        PADDED_DIM=tile.padded_dim,
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    states,
    added,
    weight,
    total,
    out,
    num_rows,
    row_stride,
    added_stride,
    epsilon,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norms of rows, or of their sums with other rows, which are then also written."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    places = tl.arange(0, PADDED_DIM)[None, :]
    inside = (rows < num_rows) & (places < DIM)
    numbers = tl.load(states + rows * row_stride + places, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + places, mask=places < DIM, other=0.0)
    if added is not None:
        more = tl.load(added + rows * added_stride + places, mask=inside, other=0.0)
        # The norm is that of the rounded sum, which later layers read.
        rounded = (numbers + more.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(total + rows * DIM + places, rounded, mask=inside)
        numbers = rounded.to(tl.float32)
    mean = tl.sum(numbers * numbers, 1) / DIM
    normed = numbers * tl.rsqrt(mean + epsilon)[:, None] * factors
    tl.store(out + rows * DIM + places, normed.to(out.dtype.element_ty), mask=inside)

"""Gated activations in Triton: a program has a part of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.fused.rows import dense_rows
from kernels.gpu.fused.tiles import activation_tile


def gated_activation_triton(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """As `kernels.fused.gated_activation`; `activation` is the number of one."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be alike")
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    (gates, gate_stride), (values, value_stride) = dense_rows(gate), dense_rows(up)
    num_rows, dim = gates.shape
    tile = activation_tile(dim)
    num_parts = triton.cdiv(dim, tile.padded_dim)
    gated_activation_kernel[(triton.cdiv(num_rows, tile.rows) * num_parts,)](
        gates,
        values,
        out,
        num_rows,
        gate_stride,
        value_stride,
        ACTIVATION=int(activation),
        DIM=dim,
        PADDED_DIM=tile.padded_dim,
        ROWS=tile.rows,
        NUM_PARTS=num_parts,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def gated_activation_kernel(  # type: ignore[no-untyped-def]
    gates,
    values,
    out,
    num_rows,
    gate_stride,
    value_stride,
    ACTIVATION: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    rows = program // NUM_PARTS * ROWS + tl.arange(0, ROWS)[:, None]
    places = (program % NUM_PARTS).to(tl.int32) * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :]
    inside = (rows < num_rows) & (places < DIM)
    gate = tl.load(gates + rows * gate_stride + places, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(values + rows * value_stride + places, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        exponent = -gate
    else:
        # 1 + tanh(x) is twice the logistic function of 2 x.
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = tl.div_rn(gate, 1.0 + tl.exp(exponent))
    tl.store(out + rows * DIM + places, (active * value).to(out.dtype.element_ty), mask=inside)

"""Rotary embeddings in Triton, and norms of heads before them: a program has some heads."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.fused.tiles import rotation_tile


def rope_triton(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor]:
    """As `kernels.fused.rope`. The tokens come first in the results' memory."""
    _, num_heads, num_tokens, dim = query.shape
    num_key_heads = key.shape[1]
    if key.shape != (1, num_key_heads, num_tokens, dim) or key.dtype != query.dtype:
        raise ValueError(f"query {tuple(query.shape)} and key {tuple(key.shape)} must be alike")
    cosines, sines = _angles(cosines, num_tokens, dim), _angles(sines, num_tokens, dim)
    rotated = query.new_empty(num_tokens, num_heads, dim)
    rotated_key = query.new_empty(num_tokens, num_key_heads, dim)
    if num_tokens:
        query, key = _dense(query), _dense(key)
        tile = rotation_tile(dim)
        most_heads = max(num_heads, num_key_heads)
        rope_kernel[(triton.cdiv(num_tokens * most_heads, tile.rows), 2)](
            query,
            key,
            rotated,
            rotated_key,
            cosines,
            sines,
            num_tokens,
            *_strides(query, num_heads),
            *_strides(key, num_key_heads),
            NUM_HEADS=num_heads,
            NUM_KEY_HEADS=num_key_heads,
            DIM=dim,
            PADDED_HALF=tile.padded_dim,
            ROWS=tile.rows,
            num_warps=tile.num_warps,
            enable_fp_fusion=False,
        )
    # `[1, heads, num_tokens, dim]`.
    return rotated.transpose(0, 1).unsqueeze(0), rotated_key.transpose(0, 1).unsqueeze(0)


def qk_norm_rope_triton(
    heads: Tensor, cosines: Tensor, sines: Tensor, norms: Tensor | None, epsilon: float
) -> None:
    """As `kernels.fused.qk_norm_rope`."""
    num_tokens, num_heads, dim = heads.shape
    if heads.stride(2) != 1 and dim > 1:
        raise ValueError("heads must be contiguous: they are changed in place")
    if norms is not None and norms.shape != (num_heads, dim):
        raise ValueError(f"norms {tuple(norms.shape)} must be those of {num_heads} heads of {dim}")
    cosines, sines = _angles(cosines, num_tokens, dim), _angles(sines, num_tokens, dim)
    if not num_tokens:
        return
    tile = rotation_tile(dim)
    qk_norm_rope_kernel[(triton.cdiv(num_tokens * num_heads, tile.rows),)](
        heads,
        cosines,
        sines,
        norms,
        num_tokens,
        heads.stride(0),
        heads.stride(1),
        epsilon,
        NUM_HEADS=num_heads,
        DIM=dim,
        PADDED_HALF=tile.padded_dim,
        ROWS=tile.rows,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )


def _angles(table: Tensor, num_tokens: int, dim: int) -> Tensor:
    """A dense table of cosines or sines."""
    if table.shape != (1, num_tokens, dim) or dim % 2:
        raise ValueError(f"cosines and sines {tuple(table.shape)} must be those of {num_tokens} "
                         f"tokens and of an even dimension, {dim}")  # fmt: skip
    return table.contiguous()


def _dense(states: Tensor) -> Tensor:
    """The states with contiguous heads."""
    return states if states.stride(3) == 1 or states.shape[3] == 1 else states.contiguous()


def _strides(states: Tensor, num_heads: int) -> tuple[int, int]:
    """Those of tokens and of heads, which do not depend on the number of tokens."""
    token_stride, head_stride = states.stride(2), states.stride(1)
    if states.shape[2] == 1:
        return num_heads * states.shape[3], states.shape[3] if num_heads == 1 else head_stride
    return token_stride, head_stride


@triton.jit(do_not_specialize=["num_tokens"])
def qk_norm_rope_kernel(  # type: ignore[no-untyped-def]
    heads,
    cosines,
    sines,
    norms,
    num_tokens,
    token_stride,
    head_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Heads in place; without `norms` only rotated."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    _rotate(
        heads,
        heads,
        cosines,
        sines,
        norms,
        rows,
        num_tokens,
        token_stride,
        head_stride,
        token_stride,
        head_stride,
        epsilon,
        NUM_HEADS,
        DIM,
        PADDED_HALF,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    rotated,
    rotated_key,
    cosines,
    sines,
    num_tokens,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Queries, and keys by the programs of the second line."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if tl.program_id(1) == 0:
        _rotate(
            query,
            rotated,
            cosines,
            sines,
            None,
            rows,
            num_tokens,
            query_token_stride,
            query_head_stride,
            NUM_HEADS * DIM,
            DIM,
            0.0,
            NUM_HEADS,
            DIM,
            PADDED_HALF,
        )
    else:
        _rotate(
            key,
            rotated_key,
            cosines,
            sines,
            None,
            rows,
            num_tokens,
            key_token_stride,
            key_head_stride,
            NUM_KEY_HEADS * DIM,
            DIM,
            0.0,
            NUM_KEY_HEADS,
            DIM,
            PADDED_HALF,
        )


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    source,
    destination,
    cosines,
    sines,
    norms,
    rows,
    num_tokens,
    token_stride,
    head_stride,
    out_token_stride,
    out_head_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """A row is a head of a token."""
    HALF: tl.constexpr = DIM // 2
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    places = tl.arange(0, PADDED_HALF)[None, :]
    inside = (tokens < num_tokens) & (places < HALF)
    source += tokens * token_stride + heads * head_stride + places
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angles = tokens * DIM + places
    first_cosine = tl.load(cosines + angles, mask=inside, other=0.0).to(tl.float32)
    second_cosine = tl.load(cosines + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    first_sine = tl.load(sines + angles, mask=inside, other=0.0).to(tl.float32)
    second_sine = tl.load(sines + angles + HALF, mask=inside, other=0.0).to(tl.float32)
    if norms is not None:
        weights = norms + heads * DIM + places
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM
        factor = tl.rsqrt(mean + epsilon)[:, None]
        first = first * factor * tl.load(weights, mask=inside, other=0.0)
        second = second * factor * tl.load(weights + HALF, mask=inside, other=0.0)
    dtype = destination.dtype.element_ty
    destination += tokens * out_token_stride + heads * out_head_stride + places
    rotated = first * first_cosine - second * first_sine
    tl.store(destination, rotated.to(dtype), mask=inside)
    rotated = second * second_cosine + first * second_sine
    tl.store(destination + HALF, rotated.to(dtype), mask=inside)

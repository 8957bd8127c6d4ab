"""`kv_write` in Triton: a program writes a few rows, each one head of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import kv_write_rows, padded_dim

# Bits of the mantissas of 8-bit numbers.
_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def kv_write_triton(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """As `kernels.kv_write.kv_write`, without checks of slots, which are on the device."""
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    if num_tokens * num_heads == 0:
        return
    copied = key.dtype == k_cache.dtype and k_scale == v_scale == 1.0
    mantissa_bits = 0 if copied else _MANTISSA_BITS.get(k_cache.dtype, 0)
    key, value = _dense(key), _dense(value)
    if k_cache.dtype.itemsize == 1:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if key.dtype.itemsize == 1:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    dims = padded_dim(key_dim), padded_dim(value_dim)
    num_rows = num_tokens * num_heads
    rows = kv_write_rows(max(dims), key.dtype.itemsize)
    _kv_write_kernel[(triton.cdiv(num_rows, rows),)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        num_rows,
        k_scale,
        v_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PADDED_KEY_DIM=dims[0],
        PADDED_VALUE_DIM=dims[1],
        ROWS=rows,
        SCALED=not copied,
        MANTISSA_BITS=mantissa_bits,
        num_warps=4,
    )


def _dense(states: Tensor) -> Tensor:
    """The states with contiguous heads."""
    return states if states.stride(2) == 1 else states.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def _kv_write_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    num_rows,
    k_scale,
    v_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    # 64 bits: ids times strides exceed 2^31 in a large pool, heads times strides if heads are
    # first.
    heads = (rows % NUM_HEADS).to(tl.int64)
    tokens = (rows // NUM_HEADS).to(tl.int64)
    slots = tl.load(slot_mapping + tokens, mask=inside, other=-1).to(tl.int64)
    entries = slots * NUM_HEADS + heads
    # All loads precede the stores, so that their latencies overlap.
    key_dims = tl.arange(0, PADDED_KEY_DIM)[None, :]
    key_rows = key + (tokens * key_token_stride + heads * key_head_stride)[:, None]
    key_mask = (slots >= 0)[:, None] & (key_dims < KEY_DIM)
    keys = tl.load(key_rows + key_dims, mask=key_mask)
    value_dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    value_rows = value + (tokens * value_token_stride + heads * value_head_stride)[:, None]
    value_mask = (slots >= 0)[:, None] & (value_dims < VALUE_DIM)
    values = tl.load(value_rows + value_dims, mask=value_mask)
    if SCALED:
        keys = _quantised(keys, k_scale, k_cache.dtype.element_ty, MANTISSA_BITS)
        values = _quantised(values, v_scale, v_cache.dtype.element_ty, MANTISSA_BITS)
    tl.store(k_cache + (entries * KEY_DIM)[:, None] + key_dims, keys, mask=key_mask)
    tl.store(v_cache + (entries * VALUE_DIM)[:, None] + value_dims, values, mask=value_mask)


@triton.jit
def _quantised(states, scale, DTYPE: tl.constexpr, MANTISSA_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    scaled = tl.div_rn(states.to(tl.float32), scale)
    # Triton requires two `return` statements to have the same type.
    return scaled.to(DTYPE) if MANTISSA_BITS == 0 else _to_8_bits(scaled, MANTISSA_BITS)


@triton.jit
def _to_8_bits(numbers, MANTISSA_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of the nearest 8-bit numbers, ties to even, saturating.

    Written out, as not every device has an instruction for it, and the interpreter does not round.
    """
    # e4m3 has no infinity, and its largest number is one below NaN; e5m2 is like half precision.
    BIAS: tl.constexpr = 7 if MANTISSA_BITS == 3 else 15
    LARGEST: tl.constexpr = 448.0 if MANTISSA_BITS == 3 else 57344.0
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # Near this number the last bit of single precision is the smallest 8-bit number.
    BESIDE: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA_BITS)
    signs = (numbers.to(tl.int32, bitcast=True) >> 24) & 0x80
    sizes = tl.abs(numbers)
    is_nan = sizes != sizes
    sizes = tl.where(sizes > LARGEST, LARGEST, sizes)
    bits = sizes.to(tl.int32, bitcast=True)
    half = (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)
    normal = ((bits + half) >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
    subnormal = (sizes + BESIDE).to(tl.int32, bitcast=True) & ((1 << SHIFT) - 1)
    bits = tl.where(sizes < SMALLEST_NORMAL, subnormal, normal)
    return (tl.where(is_nan, 0x7F, bits) | signs).to(tl.uint8)

"""Converts bytes with two numbers of 4 bits, -8 to 7, to 16 or 32 bits.

Compilers divide one byte at a time. PTX divides four: a number plus 8 becomes the lowest bits of
128 (bfloat16) or 1024 (float16), which is subtracted together with the 8. The results are exact, as
those of the plain code, which runs in single precision and in the interpreter.
"""

from typing import Final

import torch
import triton
import triton.language as tl

# The interpreter and other compilers than that for NVIDIA's GPUs do not know PTX.
_HAS_PTX: Final = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


def _ptx(select: str, one: int, sixteen: int, minus: int) -> tl.constexpr:
    """Code from four bytes to 16 times their numbers. `select` leaves a number in the low half of
    each byte; `one` are the high bytes of 128 or 1024, the others pairs of factors and summands."""
    return tl.constexpr(
        f"""{{
        .reg .b32 bytes, sixteen, minus;
        {select}
        and.b32 bytes, bytes, 0x0F0F0F0F;
        xor.b32 bytes, bytes, 0x08080808;
        mov.b32 sixteen, {sixteen:#x};
        mov.b32 minus, {minus:#x};
        prmt.b32 $0, bytes, {one:#x}, 0x4140;
        prmt.b32 $1, bytes, {one:#x}, 0x4342;
        fma.rn.TYPE $0, $0, sixteen, minus;
        fma.rn.TYPE $1, $1, sixteen, minus;
    }}""".replace("TYPE", "bf16x2" if one == _BFLOAT16[0] else "f16x2")
    )


_LOW, _HIGH = "mov.b32 bytes, $2;", "shr.u32 bytes, $2, 4;"
# High bytes of 128 and of 1024; 16; -16 * (128 + 8) and -16 * (1024 + 8).
_BFLOAT16: Final = (0x43434343, 0x41804180, 0xC508C508)
_FLOAT16: Final = (0x64646464, 0x4C004C00, 0xF408F408)
_LOW_TO_BFLOAT16: Final = _ptx(_LOW, *_BFLOAT16)
_HIGH_TO_BFLOAT16: Final = _ptx(_HIGH, *_BFLOAT16)
_LOW_TO_FLOAT16: Final = _ptx(_LOW, *_FLOAT16)
_HIGH_TO_FLOAT16: Final = _ptx(_HIGH, *_FLOAT16)


@triton.jit
def low_halves(values, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 times the numbers in the low halves of bytes."""
    if _HAS_PTX and tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _LOW_TO_BFLOAT16, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif _HAS_PTX and tl.float16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _LOW_TO_FLOAT16, "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        numbers = (values << 4).to(DTYPE)
    return numbers


@triton.jit
def high_halves(values, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 times the numbers in the high halves of bytes."""
    if _HAS_PTX and tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _HIGH_TO_BFLOAT16, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif _HAS_PTX and tl.float16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _HIGH_TO_FLOAT16, "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        numbers = (values & -16).to(DTYPE)
    return numbers

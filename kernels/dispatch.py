"""Chooses the implementation of an operation."""

import os
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch

from kernels.cpu.extension import load_extension


class Implementation(StrEnum):
    """An implementation of an operation, by its name in settings and logs."""

    REFERENCE = "reference"  # the function beside the operation: simple and slow
    TORCH = "torch"  # torch operations, on any device
    TRITON = "triton"  # Triton's compiler, for GPUs
    CPP_PORTABLE = "cpp-portable"  # C++, for any processor
    CPP_AVX2 = "cpp-avx2"  # C++, with AVX2, FMA and F16C
    CPP_AVX512 = "cpp-avx512"  # C++, with AVX-512 F, BW, DQ and VL
    CPP_AVX512_VNNI = "cpp-avx512-vnni"  # the same, and dot products of 8-bit integers
    CPP_AVX512_BF16 = "cpp-avx512-bf16"  # the same, and dot products of bfloat16
    CPP_AMX = "cpp-amx"  # the same, and matrix products by AMX tiles

    @property
    def is_cpp(self) -> bool:
        return self in _CPP

    @property
    def isa(self) -> int:
        """The number of the instruction set in C++. ValueError if the implementation has none."""
        return _CPP.index(self)


_CPP: Final = (
    Implementation.CPP_PORTABLE,
    Implementation.CPP_AVX2,
    Implementation.CPP_AVX512,
    Implementation.CPP_AVX512_VNNI,
    Implementation.CPP_AVX512_BF16,
    Implementation.CPP_AMX,
)


def interprets_triton() -> bool:
    """Whether Triton interprets kernels on the processor; decided before it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# `cpp` is the most capable C++ implementation for this processor; `auto` is `cpp` on processors and
# Triton on GPUs, or torch where that is not available.
SETTINGS: Final = ("auto", "cpp", *Implementation)
# Kernels in Triton are imported where they can run: Triton is installed on Linux alone, and takes a
# tenth of a second and 70 MB, which torch without support for GPUs should not pay.
HAS_TRITON: Final = find_spec("triton") is not None and (
    torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    or interprets_triton()
)
# The dtypes of C++ and Triton kernels.
_KERNEL_DTYPES: Final = {
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


class NoSuchKernel(ValueError):
    """The requested implementation is not available; the message has the reason."""


@cache
def cpp_implementations() -> tuple[Implementation, ...]:
    """The C++ implementations for this processor, the most capable last; none without a
    compiler."""
    if not load_extension():
        return ()
    return _CPP[: torch.ops.quire.best_isa() + 1]


def choose(
    device_type: str, dtypes: Iterable[torch.dtype], setting: str = "auto"
) -> Implementation:
    """The implementation for tensors of these types on this kind of device.

    `setting` is one of SETTINGS. NoSuchKernel if it names an implementation that is not available.
    """
    if setting in (Implementation.REFERENCE, Implementation.TORCH):
        return Implementation(setting)
    unknown = set(dtypes) - _KERNEL_DTYPES
    if unknown:
        return _fallback(setting, f"there are no kernels for {sorted(map(str, unknown))}")
    if device_type == "cpu" and setting != Implementation.TRITON:
        return _choose_cpp(setting)
    return _choose_triton(device_type, setting)


def _choose_cpp(setting: str) -> Implementation:
    available = cpp_implementations()
    if not available:
        return _fallback(setting, "the C++ kernels cannot be built")
    if setting in ("auto", "cpp"):
        return available[-1]
    if setting not in available:
        raise NoSuchKernel(f"{setting}: this machine runs {', '.join(available)}")
    return Implementation(setting)


def _choose_triton(device_type: str, setting: str) -> Implementation:
    if setting not in ("auto", Implementation.TRITON):
        return _fallback(setting, f"C++ kernels do not run on {device_type}")
    if device_type != "cuda" and not (device_type == "cpu" and interprets_triton()):
        return _fallback(setting, f"Triton kernels do not run on {device_type}")
    if not HAS_TRITON:
        return _fallback(setting, "Triton is not installed")
    return Implementation.TRITON


def _fallback(setting: str, reason: str) -> Implementation:
    if setting != "auto":
        raise NoSuchKernel(f"{setting}: {reason}")
    return Implementation.TORCH

"""Which implementation of an operation serves."""

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from typing import Final

import torch

from kernels.cpu.extension import load_extension


class Implementation(StrEnum):
    """Of an operation; the name is what a log line says."""

    REFERENCE = "reference"  # the twin: obvious and slow
    TORCH = "torch"  # torch's own operations, on any device
    CPP_PORTABLE = "cpp-portable"  # C++, for any processor
    CPP_AVX2 = "cpp-avx2"  # C++, with AVX2, FMA and F16C
    CPP_AVX512 = "cpp-avx512"  # C++, with AVX-512 F, BW, DQ and VL

    @property
    def isa(self) -> int:
        """The number by which the C++ kernels know their instruction set. ValueError if none."""
        return _CPP.index(self)


_CPP: Final = (Implementation.CPP_PORTABLE, Implementation.CPP_AVX2, Implementation.CPP_AVX512)
# `cpp` is the most capable C++ that this processor runs; `auto` that one where it can be.
SETTINGS: Final = ("auto", "cpp", *Implementation)
_CPP_DTYPES: Final = {
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


class NoSuchKernel(ValueError):
    """An implementation was asked for that cannot serve here; the message says why."""


@cache
def cpp_implementations() -> tuple[Implementation, ...]:
    """The C++ implementations that run here, the most capable last; none without a compiler."""
    if not load_extension():
        return ()
    return _CPP[: torch.ops.quire.best_isa() + 1]


def choose(
    device_type: str, dtypes: Iterable[torch.dtype], setting: str = "auto"
) -> Implementation:
    """The implementation for tensors of these types on this kind of device.

    `setting` is one of SETTINGS. NoSuchKernel if it names what cannot serve.
    """
    if setting in (Implementation.REFERENCE, Implementation.TORCH):
        return Implementation(setting)
    if device_type != "cpu":
        return _fallback(setting, f"C++ kernels do not run on {device_type}")
    unknown = set(dtypes) - _CPP_DTYPES
    if unknown:
        return _fallback(setting, f"there are no C++ kernels for {sorted(map(str, unknown))}")
    available = cpp_implementations()
    if not available:
        return _fallback(setting, "the C++ kernels cannot be built")
    if setting in ("auto", "cpp"):
        return available[-1]
    if setting not in available:
        raise NoSuchKernel(f"{setting}: this machine runs {', '.join(available)}")
    return Implementation(setting)


def _fallback(setting: str, reason: str) -> Implementation:
    if setting != "auto":
        raise NoSuchKernel(f"{setting}: {reason}")
    return Implementation.TORCH

"""The machine's limits: memory bandwidth and rate of matrix products."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.timing import best_seconds

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# If the system does not report it.
_LIKELY_CACHE_BYTES = 32 * 2**20
_UNITS = {"K": 2**10, "M": 2**20}
_TIMES_THE_CACHE = 4
_MATRIX_SIZE = 2048


def cache_bytes() -> int:
    """Return the size of the last-level cache."""
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(s[:-1]) * _UNITS[s[-1]] for s in sizes), default=_LIKELY_CACHE_BYTES)


@dataclass(frozen=True)
class Limits:
    """Limits of the machine with torch's number of threads."""

    working_set: int  # bytes; more than four times the last-level cache
    # Rates of torch's matrix products by dtype, measured on first use.
    _gigaflops: dict[torch.dtype, float] = field(default_factory=dict, compare=False)

    @cached_property
    def _numbers(self) -> Tensor:
        return torch.ones(-(-self.working_set // 4))

    def enough(self, unit_bytes: int) -> int:
        """Return the least number of units of `unit_bytes` that exceeds the working set."""
        return self.working_set // unit_bytes + 1

    def read(self) -> None:
        """Read a working set sequentially; write nothing."""
        self._numbers.sum()

    def gigabytes_per_s(self, seconds: float) -> float:
        """Return the bandwidth of a `read` that took `seconds`."""
        return self._numbers.nbytes / seconds / 1e9

    def gigaflops(self, dtype: torch.dtype) -> float:
        """Return the GFLOP/s of torch's product of large matrices of `dtype`."""
        if dtype not in self._gigaflops:
            self._gigaflops[dtype] = _product_gigaflops(dtype)
        return self._gigaflops[dtype]


def _product_gigaflops(dtype: torch.dtype) -> float:
    left, right = torch.randn(2, _MATRIX_SIZE, _MATRIX_SIZE).to(dtype)
    seconds = best_seconds({"product": lambda: left @ right}, rounds=10)["product"]
    return float(2 * _MATRIX_SIZE**3 / seconds / 1e9)


def limits() -> Limits:
    return Limits(_TIMES_THE_CACHE * cache_bytes() + 1)

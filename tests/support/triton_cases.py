"""Where Triton's kernels are tested: on a GPU if there is one, else interpreted."""

from typing import Final

import pytest
import torch

from kernels.choice import HAS_TRITON, interprets_triton

HAS_GPU: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda" if HAS_GPU else "cpu")
needs_triton: Final = pytest.mark.skipif(
    not (HAS_TRITON and (HAS_GPU or interprets_triton())),
    reason="Triton is not installed, or neither has a GPU nor is interpreted",
)


def needs_gpu(function: object) -> object:
    """Marks a test that only a GPU can run."""
    skipped = pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
    return pytest.mark.gpu(skipped(function))

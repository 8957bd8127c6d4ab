"""Where Triton's kernels can be tested: on a GPU, or interpreted on a processor."""

from importlib import import_module

import pytest
import torch

from kernels.dispatch import HAS_TRITON, interprets_triton

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            not (HAS_TRITON and interprets_triton()), reason="Triton's kernels are not interpreted"
        ),
    ),
    pytest.param(
        "cuda",
        marks=[*NEEDS_GPU, pytest.mark.skipif(not HAS_TRITON, reason="there is no Triton")],
    ),
]


def skip_what_is_not_interpreted(device: str, *dtypes: torch.dtype) -> None:
    """The interpreter computes with bfloat16, but wrongly."""
    if device == "cpu" and torch.bfloat16 in dtypes:
        pytest.skip(reason="the interpreter has no bfloat16")


def hasten_interpreter() -> None:
    """Leave out what Triton's interpreter does without effect, if there is an interpreter."""
    if HAS_TRITON and interprets_triton():
        import_module("triton_interpreter").hasten()

"""Prints, as JSON, what the launches of the operations between products become for a GPU that is
not there. To be run without TRITON_INTERPRET: `python -m compiled_fused`.

All tensors are without data: a launch that read a number from the device would fail.
"""

import json
from collections.abc import Callable

import torch
from compiled_kernels import Compiled, Recorder

from kernels.fused import Activation
from kernels.gpu.fused import activation, norm, rotation

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NORM_DIMS = (64, 128, 1024, 2560, 4096, 5120, 8192, 16_384)
_HEAD_DIMS = (64, 80, 96, 128, 256)
_GATE_DIMS = (1024, 3072, 8960, 28_672)
_NUM_ROWS = (1, 2, 16, 100, 4096)


def norms_of(dim: int, dtype: torch.dtype, num_rows: int = 16) -> None:
    states, weight = torch.empty(1, num_rows, dim, dtype=dtype), torch.empty(dim)
    norm.rms_norm_triton(states, weight, 1e-6)
    norm.add_rms_norm_triton(states, states, weight, 1e-6)


def gates_of(dim: int, dtype: torch.dtype, num_rows: int = 16) -> None:
    """Of one product, and of two."""
    gate, up = torch.empty(1, num_rows, 2 * dim, dtype=dtype).chunk(2, -1)
    for kind in Activation:
        activation.gated_activation_triton(gate, up, kind)
    activation.gated_activation_triton(gate.contiguous(), up.contiguous(), Activation.SILU)


def heads_of(dim: int, dtype: torch.dtype, num_tokens: int = 16) -> None:
    """Of one product, with norms and without, and of two."""
    heads = torch.empty(num_tokens, 32, dim, dtype=dtype)[:, :24]
    angles = torch.empty(1, num_tokens, dim, dtype=dtype)
    rotation.qk_norm_rope_triton(heads, angles, angles, torch.empty(24, dim), 1e-6)
    rotation.qk_norm_rope_triton(heads, angles, angles, None, 0.0)
    query, key = (one.contiguous().transpose(0, 1).unsqueeze(0) for one in heads.split([16, 8], 1))
    rotation.rope_triton(query, key, angles, angles)


_KINDS: dict[Callable[[int, torch.dtype, int], None], tuple[int, ...]] = {
    norms_of: _NORM_DIMS,
    gates_of: _GATE_DIMS,
    heads_of: _HEAD_DIMS,
}


def main() -> None:
    compiled: list[Compiled] = []
    for module in (norm, activation, rotation):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Recorder(getattr(module, name), compiled))
    found = []
    for kind, dims in _KINDS.items():
        for dim in dims:
            for dtype in _DTYPES:
                compiled.clear()
                kind(dim, dtype, 16)
                words = {"dim": str(dim), "dtype": str(dtype)}
                found += [{**vars(each), **words} for each in compiled]
        compiled.clear()
        for num_rows in _NUM_ROWS:
            kind(128, torch.bfloat16, num_rows)
        found += [{**vars(each), "rows": "many"} for each in compiled]
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.device("meta"):
        main()

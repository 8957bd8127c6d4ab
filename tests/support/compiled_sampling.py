"""Prints, as JSON, what the launches of the sampler, of changes of logits and of block copies
become for a GPU that is not there. To be run without TRITON_INTERPRET:
`python -m compiled_sampling`."""

import json
from collections.abc import Callable

import torch
from compiled_kernels import Compiled, Recorder
from logits_cases import mask_case, penalty_case, typical_case
from sampling_cases import mixed_params

from kernels.gpu import blocks, logits, logprobs, sampling, typical_p


def sample_rows_of(dtype: torch.dtype) -> None:
    rows = torch.zeros(4, 151_936, dtype=dtype)
    sampling.sample_triton(rows, mixed_params(4))
    logprobs.token_logprobs_triton(rows, torch.zeros(4, dtype=torch.int64), 20)


def change_logits_of(vocab_size: int) -> None:
    logits.apply_bitmask_triton(**vars(mask_case(vocab_size)))
    logits.apply_penalties_triton(**vars(penalty_case(vocab_size)))
    typical_p.apply_typical_p_triton(**vars(typical_case(vocab_size, 4)))


def copy_blocks_of(num_bytes: int) -> None:
    caches = [torch.zeros(4, num_bytes, 1, 1, dtype=torch.uint8) for _ in range(2)]
    blocks.copy_blocks_triton(caches, caches, torch.tensor([1]), torch.tensor([2]))


# By the kind of data.
LAUNCHES: dict[str, Callable[[], None]] = {
    "float32": lambda: sample_rows_of(torch.float32),
    "bfloat16": lambda: sample_rows_of(torch.bfloat16),
    "even lines": lambda: change_logits_of(151_936),
    "odd lines": lambda: change_logits_of(50_257),
    "aligned blocks": lambda: copy_blocks_of(32_768),
    "odd blocks": lambda: copy_blocks_of(30),
}


def record_kernels() -> list[Compiled]:
    """All that is launched from now on."""
    compiled: list[Compiled] = []
    for module in (sampling, logprobs, logits, typical_p, blocks):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Recorder(getattr(module, name), compiled))
    return compiled


if __name__ == "__main__":
    recorded = record_kernels()
    found = {}
    for kind, launch in LAUNCHES.items():
        recorded.clear()
        launch()
        found[kind] = [vars(compiled) for compiled in recorded]
    print(json.dumps(found))

"""The work of nano-vllm's benchmark: 256 prompts and outputs of 100 to 1,024 tokens each."""

import random

from benchmarks.engines.workload import Work

_NUM_REQUESTS = 256
_FEWEST, _MOST = 100, 1024
_LARGEST_TOKEN_ID = 10_000
TEMPERATURE = 0.6
# The longest sequence has 2,011 tokens.
MAX_MODEL_LEN = 4096


def workload(num_requests: int = _NUM_REQUESTS, seed: int = 0) -> Work:
    """Draw the same requests as nano-vllm: 142,827 prompt tokens, 133,966 output tokens."""
    draw = random.Random(seed)
    prompts = [
        [draw.randint(0, _LARGEST_TOKEN_ID) for _ in range(draw.randint(_FEWEST, _MOST))]
        for _ in range(num_requests)
    ]
    num_outputs = [draw.randint(_FEWEST, _MOST) for _ in range(num_requests)]
    return Work(prompts, num_outputs, TEMPERATURE)

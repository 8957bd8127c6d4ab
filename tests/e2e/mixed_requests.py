"""Prompts of many lengths for tiny models, and settings by which these are computed in chunks."""

import random

from tiny_models import VOCAB_SIZE

BLOCK_SIZE = 16
# Fewer tokens than the longer prompts have: they can only be computed in chunks.
MAX_NUM_BATCHED_TOKENS = 40
NUM_REQUESTS = 32
SETTINGS = {
    "QUIRE_WORKER_BLOCK_SIZE": str(BLOCK_SIZE),
    "QUIRE_WORKER_MAX_NUM_SEQS": str(NUM_REQUESTS),
    "QUIRE_WORKER_NUM_BLOCKS": "257",
    "QUIRE_WORKER_DTYPE": "float32",
    # Threads cost more than they bring to models this small.
    "QUIRE_WORKER_THREADS": "1",
    "QUIRE_SCHEDULER_MAX_NUM_BATCHED_TOKENS": str(MAX_NUM_BATCHED_TOKENS),
    "QUIRE_SCHEDULER_CHECK_EVERY_STEP": "true",
}


def mixed_prompts() -> list[list[int]]:
    """Of mixed length, exact multiples of the block among them, half of them with one prefix."""
    rng = random.Random(0)
    prefix = [rng.randrange(1, VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70, 72]
    fresh = [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    tails = [[rng.randrange(1, VOCAB_SIZE) for _ in range(1 + length // 2)] for length in lengths]
    prompts = fresh + [prefix + tail for tail in tails]
    rng.shuffle(prompts)
    return prompts

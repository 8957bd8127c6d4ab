"""A worker of several ranks, in real processes: token for token what transformers generates.

`test_worker_shards.py` tests the shards of all families, without processes.
"""

import random
from pathlib import Path

import pytest
from tiny_models import FAMILIES, MIXTURES, VOCAB_SIZE, Reference, save_model
from worker_driver import Driver, LaneClient, Sequence, served_model

_MODELS = FAMILIES | MIXTURES
_NUM_TOKENS = 24
_PROMPT_LENS = (1, 3, 4, 5, 8, 13, 16, 30)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_shards", "num_stages"), [("gpt_oss", 2, 1), ("llama", 1, 2), ("mixtral", 4, 1)]
)
async def test_equals_generate(name: str, num_shards: int, num_stages: int, tmp_path: Path) -> None:
    model = save_model(_MODELS[name](), tmp_path / name)
    reference = Reference(model)
    ranks = {"tensor_parallel_size": num_shards, "pipeline_parallel_size": num_stages}
    async with served_model(model, **ranks) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        sequences = [
            Sequence(row=row * 7 % 40, tokens=list(prompt), num_prompt_tokens=len(prompt))
            for row, prompt in enumerate(prompts(_PROMPT_LENS))
        ]
        await Driver(lane).run(sequences, _NUM_TOKENS)
    for sequence, prompt in zip(sequences, prompts(_PROMPT_LENS), strict=True):
        expected = reference.generate(prompt, _NUM_TOKENS)
        assert len(set(expected)) >= 8
        assert sequence.tokens[len(prompt) :] == expected

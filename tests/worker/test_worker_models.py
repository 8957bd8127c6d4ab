"""Whole sequences through Execute, token for token against transformers' generate."""

import random
from pathlib import Path

import pytest
from tiny_models import FAMILIES, MIXTURES, VOCAB_SIZE, Reference, save_model
from worker_driver import BLOCK_SIZE, STEPS_QUEUE_UP, Driver, LaneClient, Sequence, served_model

_MODELS = FAMILIES | MIXTURES
# The others run in `make test-slow`.
_FAST = ("gemma2", "gpt2", "mixtral")
_NUM_TOKENS = 24
# Around the block size's multiples, and longer than a chunk and Gemma's window.
_PROMPT_LENS = (1, 3, 4, 5, 8, 13, 16, 30)


@pytest.fixture(
    params=[
        name if name in _FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(_MODELS)
    ]
)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_model(_MODELS[request.param](), tmp_path / "model")


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("steps_queue_up", STEPS_QUEUE_UP)
async def test_equals_generate(model: Path, steps_queue_up: bool) -> None:
    reference = Reference(model)
    async with served_model(model, steps_queue_up=steps_queue_up) as worker:
        lane = LaneClient(worker.stub)
        hello = await lane.open()
        assert hello.block_size == BLOCK_SIZE
        sequences = [
            # Rows in no particular order.
            Sequence(row=row * 7 % 40, tokens=list(prompt), num_prompt_tokens=len(prompt))
            for row, prompt in enumerate(prompts(_PROMPT_LENS))
        ]
        await Driver(lane).run(sequences, _NUM_TOKENS)
    for sequence, prompt in zip(sequences, prompts(_PROMPT_LENS), strict=True):
        expected = reference.generate(prompt, _NUM_TOKENS)
        assert len(set(expected)) >= 8
        assert sequence.tokens[len(prompt) :] == expected

"""A long-context Phi-3: one set of rotary frequencies for the whole service, by its length."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import (
    INITIALIZER_RANGE,
    MAX_MODEL_LEN,
    SMALL,
    VOCAB_SIZE,
    Reference,
    save_model,
)
from transformers import Phi3Config, PhimoeConfig
from worker_driver import STEPS_QUEUE_UP, Driver, LaneClient, Sequence, served_model

from worker_svc.errors import WrongSettingError
from worker_svc.model.loading import load_model

_SHORT_RANGE = 32
_NUM_TOKENS = 8


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Phi3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        original_max_position_embeddings=_SHORT_RANGE,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    )
    return save_model(config, tmp_path_factory.mktemp("phi3"))


def max_model_len(folder: Path, wanted: int | None) -> int:
    return load_model(str(folder), None, "float32", torch.device("cpu"), wanted).max_model_len


def test_the_short_range_is_the_default_and_the_long_one_is_asked_for(phi3: Path) -> None:
    assert max_model_len(phi3, None) == _SHORT_RANGE
    assert max_model_len(phi3, MAX_MODEL_LEN) == MAX_MODEL_LEN
    with pytest.raises(WrongSettingError, match=f"{MAX_MODEL_LEN + 1}.*{MAX_MODEL_LEN}"):
        max_model_len(phi3, MAX_MODEL_LEN + 1)


async def outputs(model: Path, lengths: list[int], **settings: object) -> list[list[int]]:
    """The prompts in chunks of 7, together."""
    sequences = [
        Sequence(row=row, tokens=list(prompt_of(length)), num_prompt_tokens=length)
        for row, length in enumerate(lengths)
    ]
    async with served_model(model, **settings) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        await Driver(lane).run(sequences, _NUM_TOKENS)
    return [one.tokens[one.num_prompt_tokens :] for one in sequences]


def prompt_of(length: int) -> list[int]:
    return [(7 * place * place + 3 * place + length) % VOCAB_SIZE for place in range(length)]


@pytest.mark.parametrize("steps_queue_up", STEPS_QUEUE_UP)
async def test_a_short_service_gives_what_transformers_gives(
    phi3: Path, steps_queue_up: bool
) -> None:
    lengths = [5, _SHORT_RANGE - _NUM_TOKENS]
    reference = Reference(phi3)
    found = await outputs(phi3, lengths, steps_queue_up=steps_queue_up)
    assert found == [reference.generate(prompt_of(one), _NUM_TOKENS) for one in lengths]


@pytest.mark.parametrize("steps_queue_up", STEPS_QUEUE_UP)
async def test_a_long_service_uses_the_long_factors_for_all_sequences(
    phi3: Path, tmp_path: Path, steps_queue_up: bool
) -> None:
    lengths = [5, _SHORT_RANGE - 3, _SHORT_RANGE + 1, MAX_MODEL_LEN - _NUM_TOKENS - 1]
    found = await outputs(phi3, lengths, steps_queue_up=steps_queue_up, max_model_len=MAX_MODEL_LEN)
    reference = Reference(phi3)
    # Beyond the short range transformers uses them itself.
    for place in (2, 3):
        assert found[place] == reference.generate(prompt_of(lengths[place]), _NUM_TOKENS)
    # Below it transformers needs a config that has no others.
    config = json.loads((phi3 / "config.json").read_text())
    rope = config["rope_parameters"]
    rope["short_factor"] = rope["long_factor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(phi3 / "model.safetensors")
    long_only = Reference(tmp_path)
    for place in (0, 1):
        expected = long_only.generate(prompt_of(lengths[place]), _NUM_TOKENS)
        assert found[place] == expected
    # The choice makes a difference.
    assert found[0] != reference.generate(prompt_of(lengths[0]), _NUM_TOKENS)


async def test_phimoe_scales_a_short_sequence_alone_as_beside_a_long_one(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": _SHORT_RANGE,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "short_mscale": 1.0,
        "long_mscale": 4.0,
    }
    config = PhimoeConfig(**SMALL, num_local_experts=2, rope_parameters=rope, sliding_window=None)
    model = save_model(config, tmp_path)
    alone = await outputs(model, [9], max_model_len=MAX_MODEL_LEN)
    together = await outputs(model, [9, MAX_MODEL_LEN - _NUM_TOKENS], max_model_len=MAX_MODEL_LEN)
    assert together[0] == alone[0]

"""Whole sequences through Execute, token for token against transformers' generate."""

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES, MAX_MODEL_LEN, MIXTURES, SMALL, VOCAB_SIZE, Reference, save_model
from transformers import AutoConfig
from worker_driver import BLOCK_SIZE, STEPS_QUEUE_UP, Driver, LaneClient, Sequence, served_model

_MODELS = FAMILIES | MIXTURES
# The others run in `make test-slow`.
_FAST = ("gemma2", "gpt2", "mixtral")
# Families that no code of Quire's knows, with what they need besides SMALL.
_MLA = {
    **{"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
}
_OTHERS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 6},
    "deepseek_v3": {
        **_MLA,
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    },
    # Each loop over the second and third layer has keys of its own.
    "dory": {
        **{"head_dim": 8, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6},
    },
    "exaone4": {"sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    "gemma4_unified": {  # Tokens of images, which are not served, attend to later ones.
        "text_config": {
            **{**SMALL, "head_dim": 8, "global_head_dim": 8, "sliding_window": 6},
            **{"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0},
            "eos_token_id": None,
        },
    },
    "glm4": {"head_dim": 8},
    "gpt_neox": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minicpm3": _MLA,
    "olmo2": {},
    "phi": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 6},
}
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


async def check_equals_generate(model: Path, steps_queue_up: bool = False) -> list[list[int]]:
    """Return the outputs, which are those of transformers."""
    reference = Reference(model)
    async with served_model(
        model, steps_queue_up=steps_queue_up, max_model_len=MAX_MODEL_LEN
    ) as worker:
        lane = LaneClient(worker.stub)
        hello = await lane.open()
        assert hello.block_size == BLOCK_SIZE
        sequences = [
            # Rows in no particular order.
            Sequence(row=row * 7 % 40, tokens=list(prompt), num_prompt_tokens=len(prompt))
            for row, prompt in enumerate(prompts(_PROMPT_LENS))
        ]
        await Driver(lane).run(sequences, _NUM_TOKENS)
    outputs = [sequence.tokens[sequence.num_prompt_tokens :] for sequence in sequences]
    assert outputs == [reference.generate(one, _NUM_TOKENS) for one in prompts(_PROMPT_LENS)]
    return outputs


@pytest.mark.parametrize("steps_queue_up", STEPS_QUEUE_UP)
async def test_equals_generate(model: Path, steps_queue_up: bool) -> None:
    for output in await check_equals_generate(model, steps_queue_up):
        assert len(set(output)) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("family", _OTHERS)
async def test_a_family_without_code_of_its_own(family: str, tmp_path: Path) -> None:
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    values = {**SMALL, **tokens, "tie_word_embeddings": False, **_OTHERS[family]}
    outputs = await check_equals_generate(
        save_model(AutoConfig.for_model(family, **values), tmp_path)
    )
    assert len({tuple(output) for output in outputs}) == len(outputs)

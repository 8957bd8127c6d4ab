"""The forward pass without what transformers does between the parts: where, and that it gives the
same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, MAX_MODEL_LEN, VOCAB_SIZE, random_network
from torch import Tensor
from transformers import GraniteConfig, MistralConfig, PretrainedConfig, Qwen2Config

from kernels.choice import Implementation, cpp_implementations
from worker_svc.decoder_layers import join_layers, layer_examples
from worker_svc.fusing import fuse
from worker_svc.packing import pack
from worker_svc.short_pass import ShortPass, shorten

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
}


def tied() -> PretrainedConfig:
    return Qwen2Config(**_SMALL, tie_word_embeddings=True)


def windowed() -> PretrainedConfig:
    return MistralConfig(**_SMALL, sliding_window=6)


def granite() -> PretrainedConfig:
    """Like Llama's but for factors: of embeddings, of what layers add, of logits."""
    return GraniteConfig(**_SMALL, embedding_multiplier=2.0, logits_scaling=4.0)


def joined(model: Any) -> Any:
    """As the worker does it, up to where the pass is shortened."""
    implementation = cpp_implementations()[-1]
    examples = layer_examples(model, implementation)
    fuse(model, implementation)
    pack(model, implementation)
    join_layers(examples)
    return model


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    """Of three of 30 tokens that stand anywhere."""
    torch.manual_seed(1)
    tokens, positions = torch.randint(VOCAB_SIZE, (1, 30)), torch.randperm(MAX_MODEL_LEN)[:30]
    kept = torch.tensor([4, 17, 29])
    output = model(
        input_ids=tokens,
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=kept,
    )
    result: Tensor = output.logits
    return result


pytestmark = pytest.mark.skipif(not cpp_implementations(), reason="no compiled kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [FAMILIES["llama"], FAMILIES["qwen3"], tied, windowed])
def test_it_gives_the_same_bits(config: Callable[[], PretrainedConfig], dtype: torch.dtype) -> None:
    model = joined(random_network(config()).to(dtype))
    before = logits(model)
    assert shorten(model) == {"short passes": 1}
    assert isinstance(model.forward, ShortPass)
    assert logits(model).equal(before)


@pytest.mark.parametrize("config", [FAMILIES["gemma2"], FAMILIES["gpt2"], granite])
def test_other_models_keep_their_own(config: Callable[[], PretrainedConfig]) -> None:
    model = joined(random_network(config()))
    assert shorten(model) == {"short passes": 0}
    assert not isinstance(model.forward, ShortPass)


@pytest.mark.parametrize("place", ["model", "network"])
def test_what_happens_between_the_parts_is_not_left_out(place: str) -> None:
    """With the layers of Llama, so that all of them are one call."""
    model = joined(random_network(FAMILIES["llama"]()))
    changed = model.model if place == "model" else model

    class Louder(type(changed)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            key = "last_hidden_state" if place == "model" else "logits"
            output[key] = output[key] * 1.0001
            return output

    changed.__class__ = Louder
    assert shorten(model) == {"short passes": 0}


def test_layers_that_run_one_by_one_stay_where_they_are() -> None:
    model = random_network(FAMILIES["llama"]())
    examples = layer_examples(model, Implementation.TORCH)
    assert not examples
    assert shorten(model) == {"short passes": 0}

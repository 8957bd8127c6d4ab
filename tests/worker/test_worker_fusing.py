"""Exchanged parts of a model: which are, which are not, and that nothing else changes."""

from collections.abc import Callable

import pytest
import torch
from tiny_models import FAMILIES, VOCAB_SIZE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CohereConfig, PretrainedConfig

from kernels.choice import Implementation, cpp_implementations
from worker_svc.fusing import fuse


def cohere() -> PretrainedConfig:
    """Norms that take the mean away, and embeddings that turn pairs of neighbours."""
    return CohereConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )


_FUSED: tuple[tuple[Callable[[], PretrainedConfig], dict[str, int]], ...] = (
    (FAMILIES["llama"], {"norms": 7, "gates": 3, "rotations": 3}),
    (FAMILIES["qwen3"], {"norms": 13, "gates": 3, "rotations": 3}),
    (FAMILIES["gemma2"], {"norms": 13, "gates": 3, "rotations": 3}),
    (FAMILIES["gpt2"], {"norms": 0, "gates": 0, "rotations": 0}),
    (cohere, {"norms": 0, "gates": 2, "rotations": 0}),
)


def network(config: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        # As made they are all 1, or all 0.
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    result: Tensor = model(torch.randint(VOCAB_SIZE, (1, 30)), use_cache=False).logits
    return result


@pytest.mark.parametrize("implementation", cpp_implementations())
@pytest.mark.parametrize(
    ("config", "expected"), _FUSED, ids=[config.__name__ for config, _ in _FUSED]
)
def test_what_is_exchanged_gives_the_same(
    config: Callable[[], PretrainedConfig],
    expected: dict[str, int],
    implementation: Implementation,
) -> None:
    model = network(config())
    before = logits(model)
    assert dict(fuse(model, implementation)) == expected
    after = logits(model)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    if not any(expected.values()):
        assert after.equal(before)


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_one_model_s_exchange_leaves_others_alone(implementation: Implementation) -> None:
    other, exchanged = network(FAMILIES["llama"]()), network(FAMILIES["llama"]())
    before = logits(other)
    fuse(exchanged, implementation)
    assert logits(other).equal(before)


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_in_half_precision(implementation: Implementation) -> None:
    model = network(FAMILIES["qwen3"]()).to(torch.bfloat16)
    before = logits(model)
    assert dict(fuse(model, implementation)) == {"norms": 13, "gates": 3, "rotations": 3}
    assert (logits(model) - before).abs().max() < 0.05 * before.abs().max()


def test_without_kernels_nothing_is_exchanged() -> None:
    model = network(FAMILIES["llama"]())
    assert not fuse(model, Implementation.TORCH)

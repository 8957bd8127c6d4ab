"""Exchanged parts of a model: which are, which are not, and that nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from implementations import WITHOUT_PRODUCTS
from structlog.testing import capture_logs
from tiny_models import FAMILIES, VOCAB_SIZE, random_logits, random_network
from torch import Tensor
from transformers import CohereConfig, PretrainedConfig
from triton_devices import DEVICES

from kernels.dispatch import Implementation, cpp_implementations
from kernels.fused import gated_activation
from worker_svc.model.elementwise_fusion import fuse
from worker_svc.model.quantized.packing import pack_quantized
from worker_svc.model.quantized.sources import rounded_weights


def cohere() -> PretrainedConfig:
    """Norms that take the mean away, and embeddings that rotate pairs of neighbours."""
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


@pytest.mark.parametrize(
    "implementation",
    [*WITHOUT_PRODUCTS, pytest.param(Implementation.TRITON, marks=DEVICES[0].marks)],
)
@pytest.mark.parametrize(
    ("config", "expected"), _FUSED, ids=[config.__name__ for config, _ in _FUSED]
)
def test_replaced_parts_give_the_same(
    config: Callable[[], PretrainedConfig],
    expected: dict[str, int],
    implementation: Implementation,
) -> None:
    model = random_network(config())
    before = random_logits(model)
    assert dict(fuse(model, implementation)) == expected
    after = random_logits(model)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    if not any(expected.values()):
        assert after.equal(before)


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_replacing_parts_of_one_model_leaves_another_unchanged(
    implementation: Implementation,
) -> None:
    other, exchanged = random_network(FAMILIES["llama"]()), random_network(FAMILIES["llama"]())
    before = random_logits(other)
    fuse(exchanged, implementation)
    assert random_logits(other).equal(before)


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("activation", "num_gates"),
    # Those that are close to another one, or differ from it beyond a limit only, stay as they are.
    [("silu", 3), ("gelu_pytorch_tanh", 3), ("quick_gelu", 0), ("gelu_10", 0), ("relu", 0)],
)
def test_only_gates_with_the_activation_of_a_kernel_are_replaced(
    implementation: Implementation, dtype: torch.dtype, activation: str, num_gates: int
) -> None:
    config = FAMILIES["llama"]()
    config.hidden_act = activation
    model = random_network(config).to(dtype)
    assert fuse(model, implementation)["gates"] == num_gates


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_in_half_precision(implementation: Implementation) -> None:
    model = random_network(FAMILIES["qwen3"]()).to(torch.bfloat16)
    before = random_logits(model)
    assert dict(fuse(model, implementation)) == {"norms": 13, "gates": 3, "rotations": 3}
    assert (random_logits(model) - before).abs().max() < 0.05 * before.abs().max()


class CompilationError(Exception):
    """As Triton's, which is of no other class."""


def test_a_model_keeps_its_own_code_where_a_kernel_does_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rms_norm(*_: object, **__: object) -> None:
        raise CompilationError("out of registers")

    monkeypatch.setattr("worker_svc.model.elementwise_fusion.rms_norm", rms_norm)
    model = random_network(FAMILIES["qwen3"]())
    before = random_logits(model)
    with capture_logs() as logs:
        expected = {"norms": 0, "gates": 3, "rotations": 3}
        assert dict(fuse(model, WITHOUT_PRODUCTS[-1])) == expected
    assert "out of registers" in logs[0]["reason"]
    assert (random_logits(model) - before).abs().max() < 1e-4 * before.abs().max()


def test_without_kernels_nothing_is_exchanged() -> None:
    model = random_network(FAMILIES["llama"]())
    assert not fuse(model, Implementation.TORCH)


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
@pytest.mark.parametrize(("quantization", "num_gates"), [(None, 0), ("int8", 3)])
def test_products_of_rounded_rows_may_differ_more(
    implementation: Implementation,
    quantization: str | None,
    num_gates: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rounding error before the rows are rounded may move a number over a step."""

    def inexact(*args: Tensor, **named: Any) -> Tensor:
        return gated_activation(*args, **named) * 1.001

    monkeypatch.setattr("worker_svc.model.elementwise_fusion.gated_activation", inexact)
    model = random_network(FAMILIES["llama"]())
    if quantization is not None:
        pack_quantized(model, rounded_weights(model, quantization), implementation)
    assert fuse(model, implementation)["gates"] == num_gates

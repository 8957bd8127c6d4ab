"""Weights that are rounded to 8 or 4 bits while a model is loaded."""

from functools import partial
from pathlib import Path

import pytest
import torch
from implementations import ROUNDING
from tiny_models import FAMILIES, MIXTURES, llama, qwen3, random_logits, random_network, save_model
from torch import Tensor, nn
from triton_devices import DEVICES
from worker_driver import worker_settings

from kernels.dispatch import Implementation, cpp_implementations
from kernels.inputs.tiled_weight import TiledWeight
from kernels.linear import PackedWeight, round_rows
from kernels.quantized import QuantizedWeight, quantize
from worker_svc.errors import WrongSettingError
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.loading import load_model
from worker_svc.model.quantized.packing import pack_quantized, restore_weights
from worker_svc.model.quantized.sources import rounded_weights

_CPU = torch.device("cpu")
_TRITON = pytest.param(Implementation.TRITON, marks=DEVICES[0].marks)
_PACKED = pytest.mark.parametrize("implementation", [*cpp_implementations()[-1:], _TRITON])
# Of C++, one that multiplies rows as they are, and one that may round them to 8 bits.
_WIDE = [one for one in cpp_implementations() if one not in ROUNDING]
_IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [Implementation.TORCH, *_WIDE[-1:], *ROUNDING[-1:], _TRITON]
)


def is_freed(weight: Tensor) -> bool:
    return weight.stride() == (0, 0) and bool(weight.isnan().all())


def multiplied(weight: QuantizedWeight, implementation: Implementation) -> Tensor:
    """The numbers that a product multiplies with: some scales are packed as float16."""
    if implementation.is_cpp:
        weight = PackedWeight.of_quantized(weight, implementation, torch.float32).unpacked()
    if implementation == Implementation.TRITON:
        weight = TiledWeight.of(weight, torch.float32).unpacked()
    return weight.dequantize()


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_keeps_eight_bits(tied: bool) -> None:
    config = llama()
    config.tie_word_embeddings = tied
    network = random_network(config)
    for quantization, expected in (("int8", {8}), ("int4", {4})):
        sources = rounded_weights(network, quantization)
        assert sources.keys() == {m for m in network.modules() if type(m) is nn.Linear}
        assert sources[network.lm_head]().bits == 8
        assert {s().bits for m, s in sources.items() if m is not network.lm_head} == expected


def test_weights_that_are_kept_have_no_source() -> None:
    network = random_network(llama())
    kept = network.model.layers[1].mlp.down_proj
    assert kept not in rounded_weights(network, "int4", {kept})


@_IMPLEMENTATIONS
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "mixtral"])
def test_models_compute_with_the_rounded_weights(
    implementation: Implementation, family: str, tied: bool
) -> None:
    config = (FAMILIES | MIXTURES)[family]()
    config.tie_word_embeddings = tied
    network, rounded = random_network(config), random_network(config)
    weights = {layer.weight for layer in rounded.modules() if type(layer) is nn.Linear}
    with torch.no_grad():
        for weight in weights:
            head = weight is rounded.lm_head.weight
            weight.copy_(multiplied(quantize(weight, 8 if head else 4), implementation))
    counts = pack_quantized(network, rounded_weights(network, "int4"), implementation)
    assert counts["8-bit weights"] == 1
    assert counts["4-bit weights"] == len(weights) - 1
    tolerance = 1e-4
    if implementation in (*ROUNDING, Implementation.TRITON):
        # A number near the middle of two integers is rounded to either.
        tolerance = 2e-2
        for layer in rounded.modules():
            # Triton's products of 4 bits do not round rows.
            is_head = type(layer) is nn.Linear and layer.weight is rounded.lm_head.weight
            if type(layer) is nn.Linear and (implementation.is_cpp or is_head):
                layer.register_forward_pre_hook(lambda _, args: round_rows(*args))
    expected = random_logits(rounded)
    assert (random_logits(network) - expected).abs().max() < tolerance * expected.abs().max()
    if implementation != Implementation.TORCH and family == "qwen3":
        assert all(is_freed(m.weight) for m in network.modules() if type(m) is nn.Linear)
        assert is_freed(network.model.embed_tokens.weight) == tied


@_PACKED
def test_an_embedding_of_its_own(implementation: Implementation) -> None:
    class Scaled(nn.Embedding):
        def forward(self, indices: Tensor) -> Tensor:
            return super().forward(indices) * 3

    torch.manual_seed(0)
    indices = torch.tensor([[3, 9]])
    for kind in (nn.Embedding, Scaled):
        embedding, plain = kind(10, 16), kind(10, 16)
        weight = quantize(embedding.weight.detach(), 4)
        plain.weight.data = weight.dequantize()
        network = nn.ModuleList([embedding]).to(torch.bfloat16)
        pack_quantized(network, {embedding: partial(weight.regrouped, 16)}, implementation)
        with torch.inference_mode():
            assert embedding(indices).equal(plain.to(torch.bfloat16)(indices))
        assert is_freed(embedding.weight) == (kind is nn.Embedding)


@_PACKED
def test_restored_weights_are_those_of_the_integers(implementation: Implementation) -> None:
    layer = nn.Linear(32, 8)
    weight = quantize(layer.weight.detach(), 8)
    pack_quantized(nn.ModuleList([layer]), {layer: lambda: weight}, implementation)
    assert is_freed(layer.weight)
    assert restore_weights([layer, nn.Linear(2, 2)]) == 1
    assert layer.weight.equal(weight.dequantize())
    assert "forward" not in vars(layer)


def test_a_weight_of_another_shape() -> None:
    def other() -> QuantizedWeight:
        return quantize(torch.randn(8, 16), 8)

    layer = nn.Linear(32, 8)
    with pytest.raises(ModelError, match=r"shape \[8, 16\] for one of \[8, 32\]"):
        pack_quantized(nn.ModuleList([layer]), {layer: other}, Implementation.TORCH)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_products_of_triton_are_not_compiled(quantization: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    settings = worker_settings(
        save_model(llama(), tmp_path),
        device="cpu",
        kernels="triton",
        quantization=quantization,
        enable_torch_compile=True,
    )
    with pytest.raises(WrongSettingError, match="--enable-torch-compile: torch does not compile"):
        load_runner(settings)


def test_the_fingerprint_names_the_quantization(tmp_path: Path) -> None:
    folder = save_model(llama(), tmp_path)
    fingerprints = {
        load_model(str(folder), None, "auto", _CPU, None, quantization=quantization).fingerprint
        for quantization in (None, "int8", "int4")
    }
    assert len(fingerprints) == 3


def test_a_worker_with_rounded_weights_has_fused_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_runner(worker_settings(save_model(qwen3(), tmp_path), quantization="int4"))
    output = capsys.readouterr().out
    for count in ("8-bit weights=1", "4-bit weights=21", "layers in one call=3"):
        assert count in output

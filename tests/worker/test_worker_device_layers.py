"""Layers that launch few kernels on a GPU: which are replaced, and that they give what they gave.

Their Triton kernels are interpreted; C++ takes their place in bfloat16."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    INITIALIZER_RANGE,
    MIXTURES,
    SMALL,
    VOCAB_SIZE,
    random_logits,
    random_network,
)
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    GraniteConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    StableLmConfig,
)
from triton_devices import DEVICES

from kernels.dispatch import Implementation, cpp_implementations
from kernels.inputs.paged_batch import PagedBatch
from worker_svc.model.attention import set_attention
from worker_svc.model.device.device_layers import DeviceLayers, fuse_device_layers
from worker_svc.model.device.joined_products import JoinedGatedMlp, JoinedLinear, join
from worker_svc.model.elementwise_fusion import fuse
from worker_svc.model.layer_calls import record_layer_calls
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.quantized.packing import pack_quantized
from worker_svc.model.quantized.sources import rounded_weights

_TRITON = pytest.param(Implementation.TRITON, marks=DEVICES[0].marks)
_ALL = pytest.mark.parametrize("implementation", [_TRITON, *cpp_implementations()[-1:]])
_INTERPRETED = pytest.mark.parametrize("implementation", [_TRITON])


def qwen2() -> PretrainedConfig:
    """Biased projections."""
    return Qwen2Config(**SMALL)


def mistral() -> PretrainedConfig:
    return MistralConfig(**SMALL, sliding_window=6)


def granite() -> PretrainedConfig:
    """What is added is scaled before."""
    return GraniteConfig(**SMALL, residual_multiplier=0.5)


def gemma3() -> PretrainedConfig:
    """Norms of heads, and others of 1 + weight behind attention and MLP."""
    return Gemma3TextConfig(**SMALL, head_dim=8, query_pre_attn_scalar=8)


def stablelm() -> PretrainedConfig:
    """Norms with a mean, and parts of heads that are rotated."""
    return StableLmConfig(**SMALL)


def exchange(model: Any, implementation: Implementation) -> Counter[str]:
    calls = record_layer_calls(model, implementation)
    fused = fuse(model, implementation)
    return fused + fuse_device_layers(model, calls, implementation)


@_ALL
@pytest.mark.parametrize("config", [FAMILIES["llama"], FAMILIES["qwen3"], qwen2])
def test_layers_give_the_same(
    config: Callable[[], PretrainedConfig], implementation: Implementation
) -> None:
    model, own = random_network(config()), random_network(config())
    num_layers = config().num_hidden_layers
    counts = exchange(model, implementation)
    assert counts["layers"] == counts["layers in one call"] == num_layers
    assert counts["gated products"] == num_layers
    before = random_logits(own)
    assert (random_logits(model) - before).abs().max() < 1e-4 * before.abs().max()


@_ALL
@pytest.mark.parametrize(
    ("config", "norms", "gates", "rotations"),
    [(FAMILIES["gemma2"], 13, 3, 3), (gemma3, 13, 2, 2), (granite, 5, 2, 2), (stablelm, 0, 2, 2),
     (FAMILIES["gpt2"], 0, 0, 0), (MIXTURES["gpt_oss"], 7, 0, 0)],
)  # fmt: skip
def test_other_layers_keep_their_code(
    config: Callable[[], PretrainedConfig],
    norms: int,
    gates: int,
    rotations: int,
    implementation: Implementation,
) -> None:
    """But for the parts that are known."""
    model, own = random_network(config()), random_network(config())
    counts = exchange(model, implementation)
    parts = {"norms": norms, "gates": gates, "rotations": rotations, "gated products": gates}
    assert +counts == +Counter(parts)
    for one in (model, own):
        one.set_attn_implementation("eager")
    before = random_logits(own)
    assert (random_logits(model) - before).abs().max() < 1e-4 * before.abs().max()


@_ALL
def test_layers_of_experts_give_the_same(implementation: Implementation) -> None:
    model, own = (random_network(MIXTURES["mixtral"]()) for _ in range(2))
    assert exchange(model, implementation)["layers in one call"] == 3
    before = random_logits(own)
    assert (random_logits(model) - before).abs().max() < 1e-4 * before.abs().max()


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        pytest.param(torch.float16, Implementation.TRITON, marks=DEVICES[0].marks),
        *((torch.bfloat16, one) for one in cpp_implementations()[-1:]),
    ],
)
def test_in_half_precision(dtype: torch.dtype, implementation: Implementation) -> None:
    config = FAMILIES["qwen3"]()
    # So that hidden states are not too large for float16.
    config.initializer_range = INITIALIZER_RANGE / 2
    model, own = (random_network(config).to(dtype) for _ in range(2))
    before = random_logits(own)
    assert exchange(model, implementation)["layers"] == 3
    assert (random_logits(model) - before).abs().max() < 0.06 * before.abs().max()


@_INTERPRETED
@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_quantised_products_are_joined_and_released(
    quantization: str, implementation: Implementation
) -> None:
    model, own = (random_network(FAMILIES["qwen3"]()) for _ in range(2))
    for one in (model, own):
        pack_quantized(one, rounded_weights(one, quantization), implementation)
    counts = exchange(model, implementation)
    assert counts["layers in one call"] == 3
    assert counts["gated products"] == 3
    before = random_logits(own)
    assert (random_logits(model) - before).abs().max() < 0.02 * before.abs().max()
    layer = model.model.layers[0]
    states = torch.ones(1, 3, 32)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"):
        assert layer.get_submodule(name)(states).isnan().all()


@pytest.mark.slow
@_INTERPRETED
def test_quantised_products_of_different_formats_are_not_joined(
    implementation: Implementation,
) -> None:
    model, own = (random_network(qwen2()) for _ in range(2))
    for one in (model, own):
        sources = rounded_weights(one, "int4")
        others = rounded_weights(one, "int8")
        for layer in one.model.layers:
            for linear in (layer.self_attn.k_proj, layer.mlp.up_proj):
                sources[linear] = others[linear]
        pack_quantized(one, sources, implementation)
    counts = exchange(model, implementation)
    assert counts["layers in one call"] == 2
    assert counts["gated products"] == 0
    before = random_logits(own)
    assert (random_logits(model) - before).abs().max() < 0.02 * before.abs().max()


@_ALL
def test_weights_are_there_once_and_can_be_read(implementation: Implementation) -> None:
    model, own = (random_network(FAMILIES["llama"]()) for _ in range(2))
    exchange(model, implementation)
    layer = model.model.layers[0]
    [first, *_] = layer.forward.layers
    joined = (first.qkv_proj.weight, layer.mlp.forward.gate_and_up.weight)
    kept = {joined[0].untyped_storage().data_ptr(): 4 * 2 * 8 * 32}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        assert weight.untyped_storage().data_ptr() in kept
        assert weight.equal(getattr(own.model.layers[0].self_attn, name).weight)
    for name in ("gate_proj", "up_proj"):
        weight = getattr(layer.mlp, name).weight
        assert weight.untyped_storage().data_ptr() == joined[1].untyped_storage().data_ptr()
        assert weight.equal(getattr(own.model.layers[0].mlp, name).weight)


def test_what_is_not_alike_is_not_joined() -> None:
    plain = nn.Linear(8, 4)
    for other in (
        nn.Linear(8, 4, bias=False),
        nn.Linear(9, 4),
        nn.Linear(8, 4).half(),
        nn.LazyLinear(4),
        nn.Identity(),
    ):
        assert join([plain, other]) is None
    replaced = nn.Linear(8, 4)
    replaced.forward = plain.forward  # type: ignore[method-assign]
    assert join([plain, replaced]) is None
    states, other = torch.randn(3, 8), nn.Linear(8, 6)
    expected = torch.cat([plain(states), other(states)], -1)
    joined = join([plain, other])
    assert joined is not None
    torch.testing.assert_close(joined(states), expected)


@_ALL
def test_hooks_of_modules_remain(implementation: Implementation) -> None:
    """By which ranks add up their parts."""
    model, own = (random_network(FAMILIES["llama"]()) for _ in range(2))
    exchange(model, implementation)
    called: list[str] = []
    for one in (model, own):
        for index, layer in enumerate(one.model.layers):
            for name in ("self_attn.o_proj", "mlp"):

                def doubled(
                    _module: nn.Module, _inputs: Any, output: Tensor, name: str = f"{index} {name}"
                ) -> Tensor:
                    called.append(name)
                    return output * 2

                layer.get_submodule(name).register_forward_hook(doubled)
    expected = random_logits(own)
    names = list(called)
    called.clear()
    assert (random_logits(model) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert called == names
    assert len(names) == 6


@_ALL
def test_layers_that_do_not_follow_one_another_run_one_by_one(
    implementation: Implementation,
) -> None:
    model, own = (random_network(FAMILIES["llama"]()) for _ in range(2))
    calls = record_layer_calls(model, implementation)
    _, second, _ = calls.values()
    # One adds something else, and is not replaced.
    second.output = second.args[0] + (second.output - second.args[0]) * 1.001
    fuse(model, implementation)
    counts = fuse_device_layers(model, calls, implementation)
    assert counts["layers"] == 2
    assert not counts["layers in one call"]
    kinds = [isinstance(layer.forward, DeviceLayers) for layer in model.model.layers]
    assert kinds == [True, False, True]
    before = random_logits(own)
    assert (random_logits(model) - before).abs().max() < 1e-4 * before.abs().max()


@_ALL
@pytest.mark.parametrize("broken", ["norm", "rotation"])
def test_a_layer_with_a_part_of_its_own_stays(broken: str, implementation: Implementation) -> None:
    model = random_network(FAMILIES["qwen3"]())
    calls = record_layer_calls(model, implementation)
    fuse(model, implementation)
    attention = model.model.layers[1].self_attn
    del (attention.k_norm if broken == "norm" else attention).forward
    assert fuse_device_layers(model, calls, implementation)["layers"] == 2


@_ALL
@pytest.mark.parametrize("config", [FAMILIES["qwen3"], mistral])
def test_on_a_paged_cache(
    config: Callable[[], PretrainedConfig], implementation: Implementation
) -> None:
    """The cache gets what it got, and the logits are the same."""
    torch.manual_seed(1)
    # A chunk behind 5 cached tokens, a whole prompt, a decoding row.
    starts, lens = torch.tensor([0, 9, 20, 21]), torch.tensor([14, 11, 7])
    tokens = torch.randint(VOCAB_SIZE, (1, 21))
    positions = torch.cat([torch.arange(5, 14), torch.arange(11), torch.tensor([6])])
    blocks = torch.randperm(30)[:12].int().view(3, 4)
    rows = torch.repeat_interleave(torch.arange(3), starts.diff())
    slots = blocks[rows, positions // 4].long() * 4 + positions % 4
    initial = torch.randn(6, 30, 4, 2, 16 if config is FAMILIES["qwen3"] else 8)
    results = []
    for is_replaced in (False, True):
        model = random_network(config())
        if is_replaced:
            assert exchange(model, implementation)["layers in one call"] > 0
        caches = initial.clone()
        pairs = [(caches[2 * i], caches[2 * i + 1]) for i in range(3)]
        attention = PagedAttention(pairs, implementation)
        attention.set_batch(PagedBatch(blocks, starts, lens, 4), slots)
        set_attention(model, attention)
        with torch.inference_mode():
            given = model(
                input_ids=tokens, position_ids=positions.unsqueeze(0), use_cache=False
            ).logits
        results.append((given, caches))
    (expected, filled), (result, written) = results
    torch.testing.assert_close(written, filled, rtol=1e-4, atol=1e-4)
    assert (result - expected).abs().max() < 1e-4 * expected.abs().max()


def test_without_kernels_nothing_is_replaced() -> None:
    model = random_network(FAMILIES["llama"]())
    assert not record_layer_calls(model, Implementation.TORCH)
    assert not fuse(model, Implementation.TORCH)


def test_a_joined_gate() -> None:
    torch.manual_seed(0)
    gate, up, down = (nn.Linear(*size, bias=False) for size in ((8, 6), (8, 6), (6, 8)))
    joined = join([gate, up])
    assert isinstance(joined, JoinedLinear)
    mlp = JoinedGatedMlp(joined, down, 0, Implementation.TORCH)  # type: ignore[arg-type]
    states = torch.randn(1, 3, 8)
    expected = down(nn.functional.silu(gate(states)) * up(states))
    torch.testing.assert_close(mlp(states), expected)

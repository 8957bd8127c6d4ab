"""Decoder layers in few operations: which are exchanged, and that they give what they gave."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from implementations import OF_PRODUCTS
from tiny_models import FAMILIES, SMALL, VOCAB_SIZE, random_logits, random_network
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    Ernie4_5Config,
    GraniteConfig,
    HeliumConfig,
    Ministral3Config,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from kernels.dispatch import Implementation, cpp_implementations
from kernels.inputs.paged_batch import PagedBatch
from worker_svc.cache.kv_scales import KvScales
from worker_svc.model.attention import set_attention
from worker_svc.model.decoder_layers import (
    DecoderLayer,
    LayerStack,
    fuse_layers,
)
from worker_svc.model.elementwise_fusion import fuse
from worker_svc.model.layer_calls import record_layer_calls
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.weight_packing import pack


def qwen2() -> PretrainedConfig:
    """Biased projections."""
    return Qwen2Config(**SMALL)


def mistral() -> PretrainedConfig:
    return MistralConfig(**SMALL, sliding_window=6)


def granite() -> PretrainedConfig:
    """What is added is scaled before."""
    return GraniteConfig(**SMALL, residual_multiplier=0.5)


def ministral() -> PretrainedConfig:
    """Queries grow with their positions, from some position on."""
    return Ministral3Config(**SMALL, head_dim=8)


def cohere2() -> PretrainedConfig:
    """Attention and MLP side by side."""
    return Cohere2Config(**SMALL)


def ernie() -> PretrainedConfig:
    """Rotate pairs of neighbours."""
    return Ernie4_5Config(**SMALL)


def helium() -> PretrainedConfig:
    return HeliumConfig(**SMALL, head_dim=8)


_JOINED = (FAMILIES["llama"], FAMILIES["qwen3"], qwen2)
_OTHERS = (FAMILIES["gemma2"], FAMILIES["gpt2"], granite, ministral, cohere2, ernie, helium)
_ALL = pytest.mark.parametrize("implementation", OF_PRODUCTS)
_BEST = pytest.mark.parametrize("implementation", cpp_implementations()[-1:])


def exchange(model: nn.Module, implementation: Implementation) -> int:
    examples = record_layer_calls(model, implementation)
    fuse(model, implementation)
    pack(model, implementation)
    return fuse_layers(examples)["layers"]


@_ALL
@pytest.mark.parametrize("config", _JOINED)
def test_layers_give_the_same(
    config: Callable[[], PretrainedConfig], implementation: Implementation
) -> None:
    model, own = random_network(config()), random_network(config())
    before = random_logits(own)
    assert exchange(model, implementation) == config().num_hidden_layers
    assert (random_logits(model) - before).abs().max() < 1e-4 * before.abs().max()


@_BEST
@pytest.mark.parametrize("config", _OTHERS)
def test_other_layers_stay(
    config: Callable[[], PretrainedConfig], implementation: Implementation
) -> None:
    model, own = random_network(config()), random_network(config())
    assert exchange(model, implementation) == 0
    for one in (model, own):
        one.set_attn_implementation("eager")
    before = random_logits(own)
    assert (random_logits(model) - before).abs().max() < 1e-4 * before.abs().max()
    # Where numbers are coarse, something else may look alike.
    assert exchange(random_network(config()).to(torch.bfloat16), implementation) == 0


@_BEST
def test_in_half_precision(implementation: Implementation) -> None:
    model, own = (random_network(FAMILIES["qwen3"]()).to(torch.bfloat16) for _ in range(2))
    before = random_logits(own)
    assert exchange(model, implementation) == 3
    assert (random_logits(model) - before).abs().max() < 0.06 * before.abs().max()


@_BEST
def test_attention_gets_the_same_arguments(implementation: Implementation) -> None:
    model = random_network(mistral())
    examples = record_layer_calls(model, implementation)
    fuse(model, implementation)
    pack(model, implementation)
    assert fuse_layers(examples)["layers"] == 2
    for example in examples.values():
        assert example.arguments["sliding_window"] == 6
        assert example.arguments["scaling"] == 8**-0.5
        assert example.shape == (4, 2, 8, 8)


@_BEST
def test_a_layer_that_adds_something_else_stays(implementation: Implementation) -> None:
    model = random_network(FAMILIES["llama"]())
    examples = record_layer_calls(model, implementation)
    first, *_ = examples.values()
    states = first.args[0]
    first.output = states + (first.output - states) * 1.001
    fuse(model, implementation)
    pack(model, implementation)
    assert fuse_layers(examples)["layers"] == 2


@_BEST
def test_a_layer_that_did_not_run_stays(implementation: Implementation) -> None:
    model = random_network(FAMILIES["llama"]())
    examples = record_layer_calls(model, implementation)
    first, second, third = examples.values()
    first.shape, second.args = (), ()
    third.kwargs = {}
    fuse(model, implementation)
    pack(model, implementation)
    assert fuse_layers(examples)["layers"] == 0


@_BEST
def test_code_that_mentions_anything_else_stays(implementation: Implementation) -> None:
    model = random_network(FAMILIES["llama"]())
    attention = model.model.layers[1].self_attn

    class Longer(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            if hidden_states.shape[1] > 5:
                hidden_states = hidden_states * 2
            return super().forward(hidden_states, **kwargs)

    attention.__class__ = Longer
    assert len(record_layer_calls(model, implementation)) == 2
    assert exchange(model, implementation) == 2


@_BEST
def test_weights_of_projections_are_there_once(implementation: Implementation) -> None:
    model = random_network(FAMILIES["llama"]())
    exchange(model, implementation)
    attention = model.model.layers[0].self_attn
    states = torch.ones(1, 3, 32)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert projection(states).isnan().all()
    assert not attention.o_proj(states).isnan().any()


@_ALL
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [*_JOINED, mistral])
def test_all_layers_in_one_call_give_the_same_bits(
    config: Callable[[], PretrainedConfig],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    implementation: Implementation,
) -> None:
    model = random_network(config()).to(dtype)
    exchange(model, implementation)
    layers = model.model.layers
    stack = layers[0].forward
    assert isinstance(stack, LayerStack)
    torch.manual_seed(1)
    # A chunk behind 5 cached tokens, a whole prompt, a decoding row.
    starts, lens = torch.tensor([0, 9, 20, 21]), torch.tensor([14, 11, 7])
    tokens = torch.randint(VOCAB_SIZE, (1, 21))
    positions = torch.cat([torch.arange(5, 14), torch.arange(11), torch.tensor([6])])
    blocks = torch.randperm(30)[:12].int().view(3, 4)
    rows = torch.repeat_interleave(torch.arange(3), starts.diff())
    slots = blocks[rows, positions // 4].long() * 4 + positions % 4
    initial = torch.randn(2 * len(layers), 30, 4, 2, 16 if config is FAMILIES["qwen3"] else 8).to(
        cache_dtype
    )
    results = []
    for in_one_call in (False, True):
        caches = initial.clone()
        pairs = [(caches[2 * i], caches[2 * i + 1]) for i in range(len(layers))]
        scales = [KvScales(0.5 + i, 0.25) for i in range(len(layers))]
        if cache_dtype.itemsize > 1:
            scales = [KvScales()] * len(layers)
        attention = PagedAttention(pairs, implementation, scales)
        assert attention.can_run(stack.weights)
        function = attention if in_one_call else attention.__call__
        attention.set_batch(PagedBatch(blocks, starts, lens, 4), slots)
        set_attention(model, function)
        with torch.inference_mode():
            given = model(
                input_ids=tokens, position_ids=positions.unsqueeze(0), use_cache=False
            ).logits
        results.append((given, caches))
    (expected, filled), (result, written) = results
    assert result.equal(expected)
    assert written.view(torch.uint8).equal(filled.view(torch.uint8))
    assert not written.view(torch.uint8).equal(initial.view(torch.uint8))


@_BEST
def test_layers_with_something_between_them_run_one_by_one(
    implementation: Implementation,
) -> None:
    model = random_network(FAMILIES["llama"]())
    examples = record_layer_calls(model, implementation)
    second = list(examples.values())[1]
    second.args = (second.args[0].clone(),)
    fuse(model, implementation)
    pack(model, implementation)
    assert fuse_layers(examples) == {"layers": 3}
    assert isinstance(model.model.layers[0].forward, DecoderLayer)


def test_without_kernels_nothing_is_exchanged() -> None:
    model = random_network(FAMILIES["llama"]())
    assert not record_layer_calls(model, Implementation.TORCH)
    assert exchange(model, Implementation.TORCH) == 0

"""The forward pass without what transformers does between the parts: where, and that it gives the
same bits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, MAX_MODEL_LEN, SMALL, VOCAB_SIZE, random_network, save_model
from torch import Tensor, nn
from transformers import MistralConfig, PretrainedConfig, Qwen2Config
from worker_driver import Sequence, admit, schedule, worker_settings

from kernels.dispatch import cpp_implementations
from quire.internal.v1 import worker_pb2
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model.decoder_layers import fuse_layers
from worker_svc.model.elementwise_fusion import fuse
from worker_svc.model.fused_forward import FusedForward, fuse_forward
from worker_svc.model.layer_calls import record_layer_calls
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.quantized.packing import pack_quantized
from worker_svc.model.quantized.sources import rounded_weights
from worker_svc.model.weight_packing import pack
from worker_svc.plan.plans import Plan, plan_from_proto


def tied() -> PretrainedConfig:
    return Qwen2Config(**SMALL, tie_word_embeddings=True)


def windowed() -> PretrainedConfig:
    return MistralConfig(**SMALL, sliding_window=6)


def joined(model: Any, quantization: str | None = None) -> Any:
    """As the worker does it, up to where the pass is shortened."""
    implementation = cpp_implementations()[-1]
    if quantization is not None:
        pack_quantized(model, rounded_weights(model, quantization), implementation)
    examples = record_layer_calls(model, implementation)
    fuse(model, implementation)
    pack(model, implementation)
    fuse_layers(examples)
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
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 1, "passes in one call": 1}
    assert isinstance(model.forward, FusedForward)
    assert logits(model).equal(before)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("config", [FAMILIES["qwen3"], tied])
def test_quantised_weights_are_multiplied_in_the_one_call(
    config: Callable[[], PretrainedConfig], quantization: str
) -> None:
    model = joined(random_network(config()).bfloat16(), quantization)
    before = logits(model)
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 1, "passes in one call": 1}
    assert logits(model).equal(before)


def test_one_call_with_another_result_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = joined(random_network(FAMILIES["llama"]()))
    run_forward = PagedAttention.run_forward
    monkeypatch.setattr(
        PagedAttention, "run_forward", lambda self, *args: run_forward(self, *args).mul_(1.0001)
    )
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 1, "passes in one call": 0}


def test_a_rotation_that_depends_on_the_longest_position_keeps_its_code() -> None:
    """As that of dynamic scaling and its kin."""
    model = joined(random_network(FAMILIES["llama"]()))
    rotary = model.model.rotary_emb

    class Stretched(nn.Module):
        def forward(self, states: Tensor, position_ids: Tensor) -> Any:
            stretch = 1.0 if position_ids.max() < MAX_MODEL_LEN // 2 else 0.5
            return rotary(states, position_ids * stretch)

    model.model.rotary_emb = Stretched()
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 1, "passes in one call": 0}


def test_a_table_that_would_be_large_is_not_made() -> None:
    model = joined(random_network(FAMILIES["llama"]()))
    assert fuse_forward(model, 10**9) == {"fused passes": 1, "passes in one call": 0}


@pytest.mark.parametrize("config", [FAMILIES["gemma2"], FAMILIES["gpt2"]])
def test_other_models_keep_their_own(config: Callable[[], PretrainedConfig]) -> None:
    model = joined(random_network(config()))
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 0, "passes in one call": 0}
    assert not isinstance(model.forward, FusedForward)


# Models with the layers of Llama, so that all of them are one call.


@pytest.mark.parametrize("place", ["model", "network"])
def test_work_between_the_parts_is_kept(place: str) -> None:
    model = joined(random_network(FAMILIES["llama"]()))
    changed = model.model if place == "model" else model

    class Louder(type(changed)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            key = "last_hidden_state" if place == "model" else "logits"
            output[key] = output[key] * 1.0001
            return output

    changed.__class__ = Louder
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 0, "passes in one call": 0}


@pytest.mark.parametrize("place", ["model", "network"])
def test_a_model_with_other_parts_keeps_its_own(place: str) -> None:
    model = joined(random_network(FAMILIES["llama"]()))
    (model.model if place == "model" else model).more = nn.Identity()
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 0, "passes in one call": 0}


def test_a_rotation_that_wants_more_keeps_its_own() -> None:
    class Demanding(nn.Module):
        def forward(self, states: Tensor, positions: Tensor, **more: Any) -> Any:
            raise TypeError("one argument is missing")

    model = joined(random_network(FAMILIES["llama"]()))
    rotate = model.model.rotary_emb
    model.model.forward = partial(_with_rotation, model.model, model.model.forward, rotate)
    model.model.rotary_emb = Demanding()
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 0, "passes in one call": 0}


def _with_rotation(model: Any, forward: Any, rotate: nn.Module, **kwargs: Any) -> Any:
    """The model's own code has the rotation that it needs."""
    demanding, model.rotary_emb = model.rotary_emb, rotate
    try:
        return forward(**kwargs)
    finally:
        model.rotary_emb = demanding


def test_layers_that_run_one_by_one_keep_the_pass() -> None:
    model = random_network(FAMILIES["llama"]())
    implementation = cpp_implementations()[-1]
    examples = record_layer_calls(model, implementation)
    second = list(examples.values())[1]
    second.args = (second.args[0].clone(),)
    fuse(model, implementation)
    pack(model, implementation)
    assert fuse_layers(examples) == {"layers": 3}
    assert fuse_forward(model, MAX_MODEL_LEN) == {"fused passes": 0, "passes in one call": 0}


def test_the_worker_serves_so_and_a_chunk_may_sample_nothing(tmp_path: Path) -> None:
    """Chunks of a prompt and a whole prompt give the same token."""
    folder = save_model(FAMILIES["llama"](), tmp_path)
    loaded = load_runner(worker_settings(folder, device="cpu"))
    assert isinstance(loaded.runner.runner._model.network.forward, FusedForward)
    whole, pieces = (
        [loaded.runner.launch(plan).output().sampled_token_ids for plan in plans]
        for plans in (_prompt(1, [11]), _prompt(2, [7, 4]))
    )
    assert pieces == [[], *whole]


def _prompt(row: int, counts: list[int]) -> list[Plan]:
    """Compute one and the same prompt in a row of its own, so many tokens at a time."""
    messages = [worker_pb2.BatchPlan(epoch=1, step=row + i) for i in range(len(counts))]
    tokens = list(range(20, 31))
    admit(messages[0], Sequence(row, tokens, len(tokens), 0, [4 * row + i for i in range(3)]))
    for message, count in zip(messages, counts, strict=True):
        schedule(message, row, count)
    return [plan_from_proto(message) for message in messages]

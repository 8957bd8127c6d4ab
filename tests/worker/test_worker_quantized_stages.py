"""Stages of checkpoints that are quantised: they give the tokens that one rank gives, and each has
its layers alone."""

from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FORMATS, write_checkpoint
from rank_runners import decoded, runner_of, staged
from rank_threads import rank_threads
from safetensors.torch import load_file, save_file
from shard_models import logits_of, prepared
from transformers import AutoConfig, LlamaForCausalLM
from worker_driver import worker_settings

from worker_svc.cache.cache_setup import cached_layers
from worker_svc.cache.kv_scales import KvScales
from worker_svc.model.loading import LoadedModel, load_model
from worker_svc.model.quantized.formats import open_checkpoint, quantization_of
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.shard_loading import layers_of
from worker_svc.model.stages.stage import Stage

# Sums in another order.
_TOLERANCE = 1e-3


@pytest.mark.parametrize(
    "name",
    [
        "gptq-4-act-order",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gptq-4-one-group", "gptq-8", "awq-128", "w8a8-zeros", "w4a16-channel")
        ),
    ],
)
def test_stages_have_the_logits_of_one_rank(name: str, tmp_path: Path) -> None:
    """Also where inputs are rounded, or are in the order of act-order: they are those of one
    rank."""
    model = write_checkpoint(FORMATS[name], tmp_path)
    expected = logits_of(prepared(model))
    with rank_threads(2, 2) as ranks:
        # transformers loads one model at a time.
        parts = [prepared(model, group) for group in ranks.groups]
        found = ranks.run(lambda rank: logits_of(parts[rank]))[0]
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("awq", 4),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("gptq-4", "w8a8", "w8a16")),
        *(
            pytest.param(name, 4, marks=pytest.mark.slow)
            for name in ("gptq-4-v2", "w4a16", "w4a16-zeros", "w8a16-plain")
        ),
    ],
)
def test_stages_give_the_tokens_of_one_rank(name: str, num_ranks: int, tmp_path: Path) -> None:
    """Four ranks are two stages of two shards."""
    model = write_checkpoint(FORMATS[name], tmp_path, tied=name == "awq")
    expected = decoded(runner_of(prepared(model), None), 24)
    assert len(set(expected)) >= 6
    with staged(model, num_ranks) as runner:
        assert decoded(runner, 24) == expected


def num_bytes(loaded: LoadedModel) -> int:
    """Of the weights when they are packed."""
    weights = [source() for source in loaded.quantized.values()]
    of_quantized = sum(
        weight.values.numel() * weight.bits // 8 + weight.scales.nbytes + weight.offsets.nbytes
        for weight in weights
    )
    # In place of quantised weights it has NaN, which take no memory.
    plain = [one for one in loaded.network.parameters() if not one.isnan().any()]
    return of_quantized + sum(one.nbytes for one in plain)


@pytest.mark.parametrize(
    ("num_shards", "num_stages"),
    [(2, 2), *(pytest.param(1, n, marks=pytest.mark.slow) for n in (2, 4))],
)
def test_each_rank_keeps_its_layers(num_shards: int, num_stages: int, tmp_path: Path) -> None:
    model = write_checkpoint(FORMATS["w4a16-zeros"], tmp_path, num_layers=4, vocab_size=16)

    def kept(shard: Shard | None) -> int:
        return num_bytes(load_model(str(model), None, "auto", torch.device("cpu"), 8, shard=shard))

    whole = kept(None)
    for stage in range(num_stages):
        for index in range(num_shards):
            part = kept(Shard(index, num_shards, Stage(stage, num_stages)))
            assert part <= 1.1 * whole / (num_shards * num_stages)


def test_layers_are_divided_by_their_size_in_the_checkpoint(tmp_path: Path) -> None:
    """A head of 32 bits costs more beside layers of 4 bits than beside those of 32."""
    model = write_checkpoint(FORMATS["w4a16"], tmp_path, num_layers=6, vocab_size=1024)

    def layers_of_stages(folder: Path) -> list[range]:
        config = AutoConfig.from_pretrained(folder)
        files = (folder / "model.safetensors",)
        stored = open_checkpoint(quantization_of(config, files), LlamaForCausalLM, config, files)
        return [layers_of(config, stored, Stage(index, 2)) for index in range(2)]

    assert layers_of_stages(model / "expected") == [range(3), range(3, 6)]
    assert layers_of_stages(model) == [range(5), range(5, 6)]


def test_scales_of_a_checkpoint_are_those_of_the_layers(tmp_path: Path) -> None:
    model = write_checkpoint(FORMATS["w8a16"], tmp_path)
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        tensors[f"{prefix}.k_scale"] = torch.tensor(0.25 + layer)
        tensors[f"{prefix}.v_scale"] = torch.tensor(0.5 + layer)
    save_file(tensors, model / "model.safetensors")
    settings = worker_settings(model, kv_cache_dtype="fp8_e4m3")
    with rank_threads(2, 2) as ranks:
        parts = [prepared(model, group) for group in ranks.groups]
    scales = [cached_layers(one.model, settings, one.implementation).scales for one in parts]
    assert scales == [(KvScales(0.25, 0.5),), (KvScales(1.25, 1.5),)]

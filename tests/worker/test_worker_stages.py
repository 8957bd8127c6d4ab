"""Stages of a model: together they give what the whole model gives, each with its layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import rank_threads
from safetensors.torch import load_file
from shard_models import logits_of, prepared, saved, with_computed
from tiny_models import FAMILIES, MIXTURES, VOCAB_SIZE
from torch import Tensor
from transformers import AutoConfig, GPT2Config, LlamaConfig, Qwen3MoeConfig
from worker_driver import worker_settings

from worker_svc.cache.cache_setup import cached_layers
from worker_svc.errors import WrongSettingError
from worker_svc.loading.model_preparation import PreparedModel
from worker_svc.loading.runner_loading import load_runner
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.formats import open_checkpoint
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.shard_loading import layers_of, read_parts
from worker_svc.model.stages.division import divide
from worker_svc.model.stages.narrowing import head_of, require_uniform_layers
from worker_svc.model.stages.stage import Stage
from worker_svc.ranks.agreement import connect_equal

_MODELS = FAMILIES | MIXTURES
# Sums in another order.
_TOLERANCE = 1e-3


@pytest.fixture(params=sorted(_MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(_MODELS[request.param](), tmp_path / "model")


def logits_of_stages(model: Path, num_ranks: int, num_stages: int, **changes: Any) -> Tensor:
    with rank_threads(num_ranks, num_stages) as ranks:
        parts = [prepared(model, group, **changes) for group in ranks.groups]
        return ranks.run(lambda rank: logits_of(parts[rank]))[0]


def check_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


def test_stages_give_what_the_model_gives(model: Path) -> None:
    expected = logits_of(prepared(model))
    for num_ranks in (2, 4):
        check_close(logits_of_stages(model, num_ranks, 2), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_constants_of_older_checkpoints_are_ignored(tmp_path: Path, name: str) -> None:
    model = with_computed(saved(_MODELS[name](), tmp_path))
    check_close(logits_of_stages(model, 2, 2), logits_of(prepared(model)))


def test_a_stage_between_others(tmp_path: Path) -> None:
    model = saved(_MODELS["gpt2"](), tmp_path)
    check_close(logits_of_stages(model, 3, 3), logits_of(prepared(model)))


def test_the_settings_give_the_layers(tmp_path: Path) -> None:
    model = saved(_MODELS["gemma2"](), tmp_path)
    expected = logits_of(prepared(model))
    for layers in ("1,2", "2,1"):
        check_close(logits_of_stages(model, 2, 2, pipeline_layers=layers), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_last_stage_has_a_tied_head(tmp_path: Path, name: str) -> None:
    config = _MODELS[name]()
    config.tie_word_embeddings = True
    model = saved(config, tmp_path)
    expected = logits_of(prepared(model))
    for num_ranks in (2, 4):
        check_close(logits_of_stages(model, num_ranks, 2), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        pytest.param({"quantization": "int4"}, marks=pytest.mark.slow),
    ],
)
def test_stages_are_rounded_as_models_are(tmp_path: Path, changes: dict[str, str]) -> None:
    model = saved(_MODELS["llama"](), tmp_path)
    expected, found = logits_of(prepared(model)), logits_of_stages(model, 2, 2, **changes)
    rounded = logits_of(prepared(model, **changes))
    assert (found - expected).abs().max() < 2 * (rounded - expected).abs().max()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_without_kernels_the_models_own_code_runs(tmp_path: Path, name: str) -> None:
    model = saved(_MODELS[name](), tmp_path)
    expected = logits_of(prepared(model))
    check_close(logits_of_stages(model, 2, 2, kernels="torch"), expected)


@pytest.mark.parametrize("name", sorted(_MODELS))
def test_each_rank_reads_its_layers(tmp_path: Path, name: str) -> None:
    """Of a model whose embeddings are small beside its layers, which the stages divide."""
    config = _MODELS[name]()
    config.max_position_embeddings = 16
    config.num_hidden_layers = 4
    config.vocab_size = 16
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention", "full_attention"] * 2
    model = saved(config, tmp_path)
    files = tuple(model.glob("*.safetensors"))
    whole = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    read = AutoConfig.from_pretrained(model)
    stored = open_checkpoint(None, None, read, files)
    for num_shards, num_stages in ((1, 2), (2, 2), (1, 4)):
        for number in range(num_stages):
            stage = Stage(number, num_stages, (4 // num_stages,) * num_stages)
            layers = layers_of(read, stored, stage)
            for index in range(num_shards):
                shard = Shard(index, num_shards, stage)
                parts = read_parts(read, stored, shard, layers).plain.values()
                num_bytes = sum(part.nbytes for part in parts)
                assert num_bytes <= 1.1 * whole / (num_shards * num_stages)


def test_the_cache_has_a_stages_layers(tmp_path: Path) -> None:
    model = saved(_MODELS["mixtral"](), tmp_path)
    whole = prepared(model).model.layers
    with rank_threads(4, 2) as ranks:
        parts = [prepared(model, group, pipeline_layers="2,1").model.layers
                 for group in ranks.groups]  # fmt: skip
    assert [len(one) for one in parts] == [2, 2, 1, 1]
    for part, layers in zip(parts, (whole[:2], whole[:2], whole[2:], whole[2:]), strict=True):
        assert 2 * sum(one.token_bytes for one in part) == sum(one.token_bytes for one in layers)


def test_scales_of_an_8_bit_cache_are_those_of_the_layers(tmp_path: Path) -> None:
    """They come from a run over random tokens, through all stages."""
    model = saved(_MODELS["llama"](), tmp_path)
    settings = worker_settings(model, kv_cache_dtype="fp8_e4m3")

    def scales(one: PreparedModel) -> list[float]:
        found = cached_layers(one.model, settings, one.implementation).scales
        return [number for scale in found for number in (scale.key, scale.value)]

    expected = scales(prepared(model))
    with rank_threads(2, 2) as ranks:
        parts = [prepared(model, group) for group in ranks.groups]
        first, second = ranks.run(lambda rank: scales(parts[rank]))
    assert [*first, *second] == pytest.approx(expected, rel=_TOLERANCE)


def test_ranks_with_different_stages_do_not_start(tmp_path: Path) -> None:
    model = saved(_MODELS["llama"](), tmp_path)
    given = ["1,2", "2,1"]
    with rank_threads(2, 2) as ranks:
        parts = [
            prepared(model, group, pipeline_layers=layers).model
            for group, layers in zip(ranks.groups, given, strict=True)
        ]

        def compare(rank: int) -> str:
            settings = worker_settings(model, pipeline_parallel_size=2, pipeline_layers=given[rank])
            with pytest.raises(WrongSettingError) as error:
                connect_equal(ranks.groups[rank], parts[rank], settings)
            return str(error.value)

        for message in ranks.run(compare):
            assert "differ in --pipeline-layers: 1,2 on rank 0, 2,1 on rank 1" in message


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head_cost", "expected"),
    [
        (12, 2, 0, (6, 6)),
        (13, 2, 0, (7, 6)),
        (12, 2, 2, (7, 5)),
        (12, 2, 30, (11, 1)),
        (32, 3, 0, (11, 11, 10)),
        (32, 3, 1.5, (11, 11, 10)),
        (34, 4, 0, (8, 9, 9, 8)),
        (35, 4, 0.5, (9, 9, 9, 8)),
        (4, 4, 9, (1, 1, 1, 1)),
        (5, 1, 1, (5,)),
    ],
)
def test_layers_are_divided_evenly(
    num_layers: int, num_stages: int, head_cost: float, expected: tuple[int, ...]
) -> None:
    found = divide(num_layers, num_stages, head_cost)
    assert sum(found) == num_layers
    assert found == expected


def test_refuses_layers_that_are_not_the_models() -> None:
    words = "10,12,11 is 33 layers, but the model has 32"
    with pytest.raises(WrongSettingError, match=words):
        Stage(0, 3, (10, 12, 11)).layers(32, 0)


def test_refuses_layers_of_one_stage_that_are_not_the_models(tmp_path: Path) -> None:
    model = saved(_MODELS["llama"](), tmp_path)
    load_runner(worker_settings(model, pipeline_layers="3")).close()
    with pytest.raises(WrongSettingError, match=r"--pipeline-layers .*: 7 is 7 layers, .* 3$"):
        load_runner(worker_settings(model, pipeline_layers="7"))


def test_refuses_more_stages_than_layers() -> None:
    words = "3 layers cannot be divided into 4 stages; set it to 3 or less"
    with pytest.raises(WrongSettingError, match=words):
        Stage(0, 4).layers(3, 0)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(scale_attn_by_inverse_layer_idx=True),
        Qwen3MoeConfig(mlp_only_layers=[0]),
        Qwen3MoeConfig(decoder_sparse_step=2),
    ],
)
def test_refuses_layers_that_depend_on_their_numbers(config: Any) -> None:
    require_uniform_layers(LlamaConfig())
    with pytest.raises(WrongSettingError, match="cannot be divided into stages"):
        require_uniform_layers(config)


def test_refuses_a_checkpoint_without_a_head() -> None:
    assert head_of(["model.embed_tokens.weight"]) == "model.embed_tokens.weight"
    with pytest.raises(ModelError, match=r"neither lm_head\.weight nor one embedding"):
        head_of(["model.norm.weight"])


def test_the_logits_of_no_row(tmp_path: Path) -> None:
    """Rank 0 learns that the pass has ended."""
    model = saved(_MODELS["llama"](), tmp_path)
    with rank_threads(2, 2) as ranks:
        parts = [prepared(model, group) for group in ranks.groups]
        found = ranks.run(lambda rank: logits_of(parts[rank], logits_indices=torch.empty(0).long()))
    assert found[0].shape == (0, VOCAB_SIZE)

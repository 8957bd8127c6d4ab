"""Shards of a model: together they give what the whole model gives, each with its part of the
weights."""

from collections import Counter
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from rank_threads import rank_threads
from safetensors.torch import load_file
from shard_models import NUM_TOKENS, logits_of, prepared, saved, with_computed
from tiny_models import FAMILIES, MIXTURES, SMALL, VOCAB_SIZE
from torch import Tensor
from transformers import AutoConfig, CohereConfig, LlamaConfig
from worker_driver import worker_settings

from kernels.dispatch import Implementation, cpp_implementations
from worker_svc.cache.cache_setup import CacheSetup, cached_layers
from worker_svc.cache.kv_scales import KvScales
from worker_svc.cache.pool_size import PoolSize
from worker_svc.errors import WrongSettingError
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.device.device_layers import fuse_device_layers
from worker_svc.model.elementwise_fusion import fuse
from worker_svc.model.layer_calls import record_layer_calls
from worker_svc.model.loading import LoadedModel
from worker_svc.model.quantized.formats import open_checkpoint
from worker_svc.model.shards.narrowing import narrow_config, rules_of
from worker_svc.model.shards.shard import Shard
from worker_svc.model.shards.shard_loading import read_parts
from worker_svc.model.shards.splits import rule_of
from worker_svc.ranks.agreement import (
    common_maxima,
    connect_equal,
    report_failure,
    with_common_size,
)
from worker_svc.ranks.group import RankGroup

_MODELS = FAMILIES | MIXTURES
# Sums in another order.
_TOLERANCE = 1e-3


@pytest.fixture(params=sorted(_MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(_MODELS[request.param](), tmp_path / "model")


def logits_of_ranks(model: Path, num_ranks: int, **changes: Any) -> Tensor:
    with rank_threads(num_ranks) as ranks:
        # transformers loads one model at a time.
        shards = [prepared(model, group, **changes) for group in ranks.groups]
        return ranks.run(lambda rank: logits_of(shards[rank]))[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_give_what_the_model_gives(model: Path, num_ranks: int) -> None:
    expected, found = logits_of(prepared(model)), logits_of_ranks(model, num_ranks)
    assert found.shape == (NUM_TOKENS, VOCAB_SIZE)
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
    ],
)
def test_variants_of_a_family_are_split(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = _MODELS["llama"]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = saved(config, tmp_path)
    expected, found = logits_of(prepared(model)), logits_of_ranks(model, 2)
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_constants_of_older_checkpoints_are_ignored(tmp_path: Path, name: str) -> None:
    model = with_computed(saved(_MODELS[name](), tmp_path))
    expected, found = logits_of(prepared(model)), logits_of_ranks(model, 2)
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_norms_with_weights_for_each_head_are_split(tmp_path: Path, num_ranks: int) -> None:
    model = saved(CohereConfig(**SMALL, use_qk_norm=True), tmp_path)
    expected, found = logits_of(prepared(model)), logits_of_ranks(model, num_ranks)
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_shards_are_rounded_as_models_are(tmp_path: Path, changes: dict[str, str]) -> None:
    model = saved(_MODELS["llama"](), tmp_path)
    expected, found = logits_of(prepared(model)), logits_of_ranks(model, 2, **changes)
    rounded = logits_of(prepared(model, **changes))
    assert (found - expected).abs().max() < 2 * (rounded - expected).abs().max()


def test_without_kernels_the_models_own_code_is_summed(model: Path) -> None:
    expected = logits_of(prepared(model))
    found = logits_of_ranks(model, 2, kernels="torch")
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("implementation", cpp_implementations()[-1:])
def test_layers_for_a_gpu_are_summed(
    model: Path, implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels in C++ in place of Triton's, which cannot be interpreted in several threads."""
    expected = logits_of(prepared(model))

    def replaced(one: LoadedModel, *_: Any) -> Counter[str]:
        calls = record_layer_calls(one.network, implementation)
        counts = fuse(one.network, implementation)
        return counts + fuse_device_layers(one.network, calls, implementation)

    monkeypatch.setattr("worker_svc.loading.model_preparation._replace_parts", replaced)
    found = logits_of_ranks(model, 2)
    assert (found - expected).abs().max() < _TOLERANCE * expected.abs().max()


def test_each_rank_reads_its_part_of_the_weights(model: Path) -> None:
    files = tuple(model.glob("*.safetensors"))
    whole = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    config = AutoConfig.from_pretrained(model)
    stored = open_checkpoint(None, None, config, files)
    for rank in range(2):
        parts = read_parts(config, stored, Shard(rank, 2), None).plain.values()
        assert sum(part.nbytes for part in parts) <= 1.1 * whole / 2


def test_the_cache_has_a_ranks_heads(model: Path) -> None:
    whole = prepared(model).model.layers
    with rank_threads(2) as ranks:
        halves = prepared(model, ranks.groups[1]).model.layers
    assert sum(one.token_bytes for one in halves) * 2 == sum(one.token_bytes for one in whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "2 does not divide the model's 3 query heads; set it to a divisor of 3",
        ),
        ({"intermediate_size": 47}, "2 does not divide the model's 47 intermediate_size"),
    ],
)
def test_refuses_sizes_that_the_ranks_do_not_divide(changes: dict[str, int], words: str) -> None:
    config = LlamaConfig(**{"hidden_size": 96, "vocab_size": 50, **changes})
    with pytest.raises(WrongSettingError, match=words):
        narrow_config(config, Shard(0, 2))


def test_refuses_key_heads_that_neither_divide_nor_are_divided() -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}
    config = LlamaConfig(**sizes, intermediate_size=64)
    words = "4 ranks and 3 key and value heads, .*; set it to a divisor or a multiple of 3"
    with pytest.raises(WrongSettingError, match=words):
        narrow_config(config, Shard(0, 4))


@pytest.mark.parametrize(
    "kind", ["olmo2", "falcon", "phi3", "exaone", "gemma4_unified_text", "helium"]
)
def test_refuses_models_without_a_known_split(kind: str) -> None:
    words = f"no split is known of models of type {kind}, but of .*Llama.* types .*qwen3_moe"
    with pytest.raises(WrongSettingError, match=words):
        rules_of(AutoConfig.for_model(kind))


def test_refuses_a_width_per_layer_by_the_type() -> None:
    with pytest.raises(WrongSettingError, match="no split is known of models of type gemma3n_text"):
        narrow_config(AutoConfig.for_model("gemma3n_text"), Shard(0, 2))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_splits_models_by_the_plans_of_transformers(kind: str) -> None:
    assert rules_of(AutoConfig.for_model(kind))


def test_refuses_a_tensor_without_a_known_split() -> None:
    with pytest.raises(ModelError, match=r"no split is known of model\.layers\.0\.other\.weight"):
        rule_of("model.layers.0.other.weight", rules_of(LlamaConfig()))


def test_ranks_with_different_checkpoints_do_not_start(tmp_path: Path) -> None:
    models = [saved(_MODELS["llama"](), tmp_path / "a"), saved(_MODELS["qwen3"](), tmp_path / "b")]
    with rank_threads(2) as ranks:
        shards = [prepared(*both).model for both in zip(models, ranks.groups, strict=True)]

        def compare(rank: int) -> str:
            with pytest.raises(WrongSettingError) as error:
                connect_equal(ranks.groups[rank], shards[rank], worker_settings(models[rank]))
            return str(error.value)

        for message in ranks.run(compare):
            assert "ranks differ in checkpoint" in message
            assert all(shard.fingerprint.hex() in message for shard in shards)


def test_ranks_with_different_types_do_not_start(model: Path) -> None:
    types = ("float32", "bfloat16")
    with rank_threads(2) as ranks:
        groups = zip(types, ranks.groups, strict=True)
        shards = [prepared(model, group, dtype=dtype).model for dtype, group in groups]

        def compare(rank: int) -> None:
            words = "ranks differ in type: float32 on rank 0, bfloat16 on rank 1; start all of them"
            with pytest.raises(WrongSettingError, match=words):
                connect_equal(ranks.groups[rank], shards[rank], worker_settings(model))

        ranks.run(compare)


def test_every_rank_finds_a_difference_that_another_has_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads the values after rank 1 has compared them."""
    model = saved(_MODELS["llama"](), tmp_path)
    reported = Event()
    with rank_threads(2) as ranks:
        first, second = ranks.groups
        shards = [prepared(model, group).model for group in ranks.groups]

        def exchange(name: str, own: Any) -> list[Any]:
            first.exchange_own(name, own)
            assert reported.wait(30)
            return RankGroup.exchange(first, name, own)

        def compare(rank: int) -> None:
            settings = worker_settings(model, block_size=4 + 4 * rank)
            words = "^ranks differ in --block-size: 4 on rank 0, 8 on rank 1"
            with pytest.raises(WrongSettingError, match=words) as error:
                connect_equal(ranks.groups[rank], shards[rank], settings)
            if rank:
                report_failure(second, error.value)
                reported.set()

        monkeypatch.setattr(first, "exchange", exchange)
        ranks.run(compare)


def test_all_ranks_have_the_scales_of_one_rank(tmp_path: Path) -> None:
    """A sequence may continue on a worker of another number of ranks."""
    model = saved(_MODELS["llama"](), tmp_path)
    settings = worker_settings(model, kv_cache_dtype="fp8_e4m3")
    one = prepared(model)
    expected = cached_layers(one.model, settings, one.implementation).scales
    with rank_threads(2) as ranks:
        shards = [prepared(model, group) for group in ranks.groups]

        def scales(rank: int) -> tuple[KvScales, ...]:
            one, share = shards[rank], partial(common_maxima, ranks.groups[rank])
            return cached_layers(one.model, settings, one.implementation, share).scales

        first, second = ranks.run(scales)
    assert first == second
    for found, scale in zip(first, expected, strict=True):
        assert found.key == pytest.approx(scale.key, rel=1e-5)
        assert found.value == pytest.approx(scale.value, rel=1e-5)


def test_all_ranks_have_the_blocks_of_the_poorest() -> None:
    sizes = [PoolSize(100, 7), PoolSize(90, 8)]
    with rank_threads(2) as ranks:
        found = ranks.run(
            lambda rank: with_common_size(ranks.groups[rank], CacheSetup((), sizes[rank], ()))
        )
    assert [one.size for one in found] == [PoolSize(90, 7)] * 2


def test_a_rank_that_cannot_load_its_shard_is_named(tmp_path: Path) -> None:
    model = saved(_MODELS["llama"](), tmp_path)
    with rank_threads(2) as ranks:
        first, second = ranks.groups
        report_failure(second, ModelError("no such folder"))
        with pytest.raises(ModelError, match="rank 1: no such folder"):
            connect_equal(first, prepared(model, first).model, worker_settings(model))

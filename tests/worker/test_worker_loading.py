"""Which models are served, how the pool is sized, what distinguishes two models."""

import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MAX_MODEL_LEN, SMALL, gemma2, gpt2, llama, save_model
from transformers import (
    BloomConfig,
    DeepseekV32Config,
    DogeConfig,
    DoryConfig,
    FalconMambaConfig,
    Llama4TextConfig,
    MoshiConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    RecurrentGemmaConfig,
    XmodConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_kernels_available
from worker_driver import worker_settings

from worker_svc.cache.kv_pool import AttentionSpec, PoolSize, size_pool
from worker_svc.errors import WrongSettingError
from worker_svc.loading.devices import find_device
from worker_svc.loading.runner_loading import convert_out_of_memory, load_runner
from worker_svc.model.attention import LayerProbe, temporary_attention
from worker_svc.model.checkpoint import model_fingerprint, weights_files
from worker_svc.model.loading import LoadedModel, ModelError, load_model
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.runner import Runner
from worker_svc.sizes import parse_size

_CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "auto", max_model_len: int | None = None) -> LoadedModel:
    return load_model(str(folder), None, dtype, _CPU, max_model_len)


def test_finds_every_layer_s_shape(tmp_path: Path) -> None:
    model = load(save_model(gemma2(), tmp_path))
    assert model.layers == (AttentionSpec(2, 8, 8, torch.float32, softcap=2.0),) * 3
    assert model.max_model_len == MAX_MODEL_LEN
    assert load(tmp_path, "bfloat16", 50).layers[0].dtype == torch.bfloat16


def test_a_length_of_its_own_by_another_name(tmp_path: Path) -> None:
    assert load(save_model(gpt2(), tmp_path)).max_model_len == MAX_MODEL_LEN
    with pytest.raises(WrongSettingError, match=f"{MAX_MODEL_LEN + 1}.*{MAX_MODEL_LEN}"):
        load(tmp_path, max_model_len=MAX_MODEL_LEN + 1)


@pytest.mark.parametrize("config", [BloomConfig(), FalconMambaConfig(), RecurrentGemmaConfig()])
def test_refuses_by_name(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="ForCausalLM"):
        load(tmp_path)


def test_refuses_layers_with_other_masks_or_state(tmp_path: Path) -> None:
    save_model(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": ["conv"] * 3}))
    with pytest.raises(ModelError, match="conv"):
        load(tmp_path)


def qwen2_moe(layer_types: list[str]) -> PretrainedConfig:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    window = {"use_sliding_window": True, "sliding_window": 6, "layer_types": layer_types}
    return Qwen2MoeConfig(**SMALL, **experts, **window, shared_expert_intermediate_size=16)


@pytest.mark.parametrize(
    "config",
    [
        PhimoeConfig(**SMALL, num_local_experts=2, sliding_window=6),
        qwen2_moe(["full_attention", "sliding_attention"]),
    ],
    ids=["phimoe", "qwen2_moe"],
)
def test_refuses_windows_that_only_masks_have(config: PretrainedConfig, tmp_path: Path) -> None:
    save_model(config, tmp_path)
    with pytest.raises(ModelError, match=r"ForCausalLM: \w+Attention .* 6 tokens .*max-model-len"):
        load(tmp_path)
    # No sequence is longer than the window.
    assert len(load(tmp_path, max_model_len=6).layers) == 2


def test_refuses_windows_that_only_the_cache_has(tmp_path: Path) -> None:
    """`generate` gives other tokens with this cache than without one."""
    save_model(MoshiConfig(**SMALL, head_dim=8, ffn_dim=48, sliding_window=6), tmp_path)
    with pytest.raises(ModelError, match=r"MoshiForCausalLM: .* 6 tokens .* cache .*max-model-len"):
        load(tmp_path)
    assert len(load(tmp_path, max_model_len=6).layers) == 2


def test_a_window_in_no_layer_needs_no_mask(tmp_path: Path) -> None:
    assert len(load(save_model(qwen2_moe(["full_attention"] * 2), tmp_path)).layers) == 2


def test_refuses_queries_scaled_by_their_place_in_the_batch(tmp_path: Path) -> None:
    attention = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]}
    config = Llama4TextConfig(**SMALL, **attention, num_local_experts=1, head_dim=8)
    save_model(config, tmp_path)
    with pytest.raises(ModelError, match=r"Llama4ForCausalLM .*attn_temperature_tuning"):
        load(tmp_path)


def test_refuses_masks_that_depend_on_the_values(tmp_path: Path) -> None:
    """Of a family whose attention functions are in a mapping of its own."""
    save_model(DogeConfig(**SMALL), tmp_path)
    with pytest.raises(ModelError, match="DogeForCausalLM: DogeAttention requires an attention"):
        load(tmp_path)


def test_refuses_attention_to_selected_keys(tmp_path: Path) -> None:
    """Its layers are of another type by default, which is refused by its name."""
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    index = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
    layers = {"layer_types": ["full_attention"] * 2, "v_head_dim": 8, "moe_intermediate_size": 16}
    save_model(DeepseekV32Config(**SMALL, **sizes, **experts, **index, **layers), tmp_path)
    with pytest.raises(ModelError, match=r"DeepseekV32ForCausalLM: .*Attention selects the keys"):
        load(tmp_path)


def test_refuses_loops_that_share_one_cache(tmp_path: Path) -> None:
    layers = {"n_input_layers": 0, "n_output_layers": 0, "layer_types": ["full_attention"] * 2}
    config = DoryConfig(**SMALL, **layers, head_dim=8, recurrent_kv_cache_mode="last_loop")
    save_model(config, tmp_path)
    with pytest.raises(ModelError, match=r"DoryForCausalLM .*recurrent_kv_cache_mode"):
        load(tmp_path)


def test_a_model_that_cannot_run_is_named(tmp_path: Path) -> None:
    save_model(XmodConfig(**SMALL, is_decoder=True, languages=["de_DE"]), tmp_path)
    with pytest.raises(ModelError, match="XmodForCausalLM does not run here: ValueError"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, r"unreadable config\.json: .*layer_type"),
        ({"vocab_size": None}, r"unreadable config\.json: .*'vocab_size'"),
        ({"dtype": "x"}, r"unreadable config\.json: .*'x'"),
        ({"model_type": []}, r"unreadable config\.json"),
        ({"hidden_act": "swish2"}, "LlamaForCausalLM cannot be loaded: .*swish2"),
        ({"num_attention_heads": 0}, r"unreadable config\.json"),
        ({"intermediate_size": -1}, "LlamaForCausalLM cannot be loaded: .*negative dimension"),
        ({"max_position_embeddings": -1}, "has max_position_embeddings -1"),
    ],
)
def test_a_config_that_makes_no_model(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="safetensors"):
        load(tmp_path)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_weights_are_not_random(name: str, tmp_path: Path) -> None:
    save_model(llama(), tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"the checkpoint has no {re.escape(name)}"):
        load(tmp_path)


def test_of_many_missing_weights_some_are_named(tmp_path: Path) -> None:
    """As of a quantised checkpoint whose config does not mention it."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[f"{name}_packed"] = tensors.pop(name)

    save_model(llama(), tmp_path)
    change_tensors(tmp_path, rename)
    with pytest.raises(ModelError, match=r"no model\.layers\.0.*, .* and 18 more"):
        load(tmp_path)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()

    save_model(llama(), tmp_path)
    change_tensors(tmp_path, cut)
    with pytest.raises(ModelError, match=r"norm.weight: \[31\] in the checkpoint, not \[32\]"):
        load(tmp_path)


def test_a_damaged_file_of_weights_is_named(tmp_path: Path) -> None:
    file = save_model(llama(), tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        load(tmp_path)


def test_the_files_are_those_that_transformers_reads(tmp_path: Path) -> None:
    """Some folders have the same weights a second time, in another format."""
    for name in ("consolidated.safetensors", "b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    assert names_of(tmp_path) == ["a.safetensors", "b.safetensors", "consolidated.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    assert names_of(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert names_of(tmp_path) == ["model.safetensors"]


def names_of(folder: Path) -> list[str]:
    return [file.name for file in weights_files(folder)]


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}, "c.safetensors, which is"),
        ({"weight_map": {}}, "no weights"),
        ({"weight_map": ["a.safetensors"]}, "AttributeError"),
        ({"weight_map": {"x": 5}}, "TypeError"),
        ({}, "weight_map"),
        ([], "TypeError"),
    ],
)
def test_an_index_that_cannot_be_followed(index: Any, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=why):
        weights_files(tmp_path)


def test_two_files_with_the_same_tensor(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"b\.safetensors has x, as another file"):
        CheckpointTensors(weights_files(tmp_path))


def test_fingerprint_distinguishes_how_a_checkpoint_is_quantised(tmp_path: Path) -> None:
    weights = weights_files(save_model(llama(), tmp_path))
    fingerprints = {model_fingerprint(tmp_path, "float32", weights)}
    for version in ("gptq", "gptq_v2"):
        for name in ("quantize_config.json", "quant_config.json"):
            (tmp_path / name).write_text(json.dumps({"checkpoint_format": version}))
            fingerprints.add(model_fingerprint(tmp_path, "float32", weights))
    assert len(fingerprints) == 5


def test_fingerprint_distinguishes_weights_config_and_dtype(tmp_path: Path) -> None:
    first = load(save_model(llama(), tmp_path / "first")).fingerprint
    again = load(save_model(llama(), tmp_path / "again")).fingerprint
    other = load(save_model(llama(), tmp_path / "other", seed=1)).fingerprint
    half = load(tmp_path / "first", "bfloat16").fingerprint
    assert first == again
    assert len({first, other, half}) == 3
    assert len(first) == 32


def test_the_pool_fills_the_memory() -> None:
    layers = (
        AttentionSpec(2, 8, 4, torch.float16),
        AttentionSpec(1, 16, 16, torch.float16),
    )
    block_bytes = 16 * (2 * 12 + 32) * 2
    sizing: dict[str, Any] = {
        "block_size": 16,
        "max_model_len": 100,
        "kv_cache_memory": block_bytes * 10 + 1,
        "num_blocks": None,
        "swap_space": block_bytes * 3,
    }
    assert size_pool(layers, **sizing) == PoolSize(10, 3)
    assert size_pool(layers, **{**sizing, "num_blocks": 8}) == PoolSize(8, 3)
    # 7 blocks are needed, and the null block is none of them.
    with pytest.raises(WrongSettingError, match=r"7 blocks.*only 6"):
        size_pool(layers, **{**sizing, "num_blocks": 7})


def test_sizes() -> None:
    sizes = {"256MiB": 2**28, "1.5 GB": 1_500_000_000, "12": 12, "4KB": 4000, "1kib": 1024}
    assert {text: parse_size(text) for text in sizes} == sizes


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    assert not is_kernels_available()


def test_the_error_of_a_small_gpu_names_the_settings() -> None:
    wrong = pytest.raises(WrongSettingError, match=r"does not hold.*--max-num-seqs: out of it")
    with wrong, convert_out_of_memory():
        raise torch.OutOfMemoryError("out of it")


def test_a_cache_is_freed_with_its_model(tmp_path: Path) -> None:
    """transformers keeps attention functions for the life of the process."""
    loaded = load_runner(worker_settings(save_model(llama(), tmp_path), device="cpu"))
    assert isinstance(loaded.runner, MultiStepRunner)
    runner = loaded.runner.runner
    assert isinstance(runner, Runner)
    caches = [weakref.ref(cache) for layer in runner._pool.layers for cache in layer]
    assert len(caches) == 6
    del loaded, runner
    gc.collect()
    assert [cache() for cache in caches] == [None] * 6


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == _CPU
    with pytest.raises(WrongSettingError, match=r"--device: cuda, but torch .* finds no GPU"):
        find_device("cuda")


def test_a_model_has_one_attention_function_at_a_time(tmp_path: Path) -> None:
    """transformers keeps a function until it is unregistered."""

    def ours() -> int:
        return sum(name.startswith("quire_") for name in ALL_ATTENTION_FUNCTIONS.valid_keys())

    model = load(save_model(llama(), tmp_path))
    before = ours()
    for _ in range(3):
        model.set_attention(LayerProbe(1))
        with temporary_attention(model.network, LayerProbe(1)):
            pass
    assert ours() == before

"""The metadata of GGUF files as configs: converted exactly, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
from tiny_models import Reference
from transformers import AutoConfig
from worker_driver import Driver, LaneClient, Sequence, served_model

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.gguf_folder import make_folder

pytest.importorskip("gguf")
models = pytest.importorskip("gguf_models")

_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]
# What a model computes with. That of a file is rounded to float32.
_FIELDS = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("rope_parameters", "sliding_window", "layer_types", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "tie_word_embeddings"),
)
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
_SLIDING = {"rope_type": "default", "rope_theta": 10_000.0}


def made(folder: Path, config: Any, **metadata: Any) -> Any:
    """The config of a file, whose further metadata have the keys of its architecture."""
    architecture = config.model_type.removesuffix("_text")
    changes = {f"{architecture}.{key}": value for key, value in metadata.items()}
    file = models.write_gguf(config, folder, lambda name: "F32", changes)
    make_folder(file, folder / "served")
    return AutoConfig.from_pretrained(folder / "served")


def head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 32, "rope_parameters": _LINEAR}),
        ("qwen2", {"rope_parameters": _LINEAR}),
        ("qwen3", {}),
        ("gemma2", {"sliding_window": 6, "rope_parameters": _LINEAR}),
        ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 64}),
        ("gemma3", {"sliding_window": 6, "num_hidden_layers": 7}),
        ("gemma3", {"num_hidden_layers": 62, "query_pre_attn_scalar": 64}),
        ("gemma3", {"rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _SLIDING}}),
        ("phi3", {}),
        ("phi3", {"sliding_window": 6}),
    ],
)
def test_the_config_is_that_of_the_model(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    expected = getattr(models, family)(**changes)
    config = made(tmp_path, expected)
    for field in _FIELDS:
        assert getattr(config, field, None) == getattr(expected, field, None), field
    assert head_dim(config) == head_dim(expected)
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": _LINEAR}),
        ("gemma2", {"sliding_window": 6}),
        ("gemma3", {"sliding_window": 6, "num_hidden_layers": 7}),
        ("phi3", {"sliding_window": 6}),
    ],
)
async def test_equals_generate(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    made(tmp_path, getattr(models, family)(**changes))
    async with served_model(tmp_path / "served", dtype="float32") as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        sequence = Sequence(row=0, tokens=list(_PROMPT), num_prompt_tokens=len(_PROMPT))
        await Driver(lane).run([sequence], 12)
    expected = Reference(tmp_path / "expected").generate(_PROMPT, 12)
    assert len(set(expected)) >= 6
    assert sequence.tokens[len(_PROMPT) :] == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_defaults_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    keys = ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv")
    keys += ("attention.key_length", "attention.value_length")
    config = made(tmp_path, getattr(models, family)(), **dict.fromkeys(keys))
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert (rotary["rope_type"], rotary["rope_theta"]) == ("default", 10_000.0)
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert head_dim(config) == 64
    assert getattr(config, "query_pre_attn_scalar", 64) == 64


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 2.0}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ],
)
def test_scales_of_positions(
    metadata: dict[str, Any], factor: float | None, tmp_path: Path
) -> None:
    rotary = made(tmp_path, models.llama(), **metadata).rope_parameters
    assert rotary["rope_type"] == ("default" if factor is None else "linear")
    assert rotary.get("factor") == factor


def test_layers_of_gemma3_with_a_window_have_their_own_base(tmp_path: Path) -> None:
    config = made(tmp_path, models.gemma3(), **{"rope.freq_base_swa": 500.0})
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 500.0


def test_soft_caps_of_gemma(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    config = made(tmp_path, models.gemma2(), **caps)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (20.0, 10.0)


def test_a_model_called_mistral_has_the_window_of_its_file(tmp_path: Path) -> None:
    named = {"general.name": "mistral"}
    for window, expected in ((6, 6), (0, None), (None, None)):
        folder = tmp_path / str(window)
        metadata = named | {"llama.attention.sliding_window": window}
        file = models.write_gguf(models.llama(), folder, lambda name: "F32", metadata)
        make_folder(file, folder / "served")
        config = AutoConfig.from_pretrained(folder / "served")
        assert (config.model_type, config.sliding_window) == ("mistral", expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_windows_of_the_whole_context(family: str, tmp_path: Path) -> None:
    config = made(tmp_path, getattr(models, family)(), **{"attention.sliding_window": 96})
    assert getattr(config, "sliding_window", None) is None


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("llama", {"rope.scaling.type": "yarn"}, "llama.rope.scaling.type yarn, which cannot"),
        ("llama", {"rope.scaling.type": 3}, "llama.rope.scaling.type 3, which cannot"),
        ("llama", {"rope.scaling.factor": -2.0}, "factor -2.0, which is not a positive number"),
        ("phi3", {"rope.scaling.factor": 4.0}, "phi3.rope.scaling.factor 4.0, which"),
        ("llama", {"rope.scaling.attn_factor": 2.0}, "attn_factor 2.0, which cannot"),
        ("llama", {"rope.dimension_count": 32}, "llama.rope.dimension_count 32, which cannot"),
        ("phi3", {"rope.dimension_count": 48}, "phi3.rope.dimension_count 48, which cannot"),
        ("gemma2", {"rope.freq_base_swa": 500.0}, "gemma2.rope.freq_base_swa 500.0, which cannot"),
        ("gemma3", {"rope.global.freq_base": 500.0}, "rope.global.freq_base 500.0, which cannot"),
        ("gemma3", {"rope.local.freq_base": 500.0}, "rope.local.freq_base 500.0, which cannot"),
        ("llama", {"attention.sliding_window": 6}, "llama.attention.sliding_window 6, which"),
        ("qwen2", {"attention.sliding_window": 6}, "qwen2.attention.sliding_window 6, which"),
        ("qwen3", {"attention.sliding_window": 6}, "qwen3.attention.sliding_window 6, which"),
        ("gemma3", {"attention.sliding_window": None}, "has no gemma3.attention.sliding_window"),
        ("gemma3", {"attention.sliding_window_pattern": 3}, "sliding_window_pattern 3, which"),
        ("gemma2", {"attention.sliding_window_pattern": [1, 1]}, "pattern with a list, which"),
        ("llama", {"attention.causal": False}, "llama.attention.causal False, which cannot"),
        ("llama", {"expert_count": 8}, "llama.expert_count 8, which cannot be converted"),
        ("llama", {"attention.head_count_kv": [2, 2]}, "head_count_kv with a list, which is not"),
        ("llama", {"vocab_size": "x"}, "llama.vocab_size x, which is not a positive integer"),
        ("llama", {"block_count": 0}, "llama.block_count 0, which is not a positive integer"),
        ("llama", {"rope.freq_base": float("nan")}, "freq_base nan, which is not a positive"),
    ],
)
def test_metadata_that_are_refused(
    family: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError, match=f"{message}.*take config.json and tokenizer.json"
    ) as found:
        made(tmp_path, getattr(models, family)(), **metadata)
    assert str(found.value).startswith(f"{tmp_path / 'model.gguf'}: has ")
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    "key",
    [
        *("context_length", "block_count", "feed_forward_length", "embedding_length"),
        *("attention.head_count", "attention.layer_norm_rms_epsilon"),
    ],
)
def test_metadata_that_are_required(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"has no llama.{key}; take config.json"):
        made(tmp_path, models.llama(), **{key: None})

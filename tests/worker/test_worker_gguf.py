"""GGUF files: blocks, models, the folders that are made of them, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import Reference
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from worker_driver import Driver, LaneClient, Sequence, served_model

from gateway_svc.text.model_files import load as load_files
from kernels.dispatch import Implementation
from worker_svc.cache.kv_scales import read_scales
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.loading import LoadedModel, load_model
from worker_svc.model.quantized import gguf_file
from worker_svc.model.quantized.gguf_blocks import BLOCK_KINDS, weight_of
from worker_svc.model.quantized.gguf_folder import make_folder
from worker_svc.model.quantized.gguf_header import GgufTensor
from worker_svc.model.quantized.packing import pack_quantized

gguf = pytest.importorskip("gguf")
models = pytest.importorskip("gguf_models")

_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(str(folder), None, "float32", torch.device("cpu"), None, **options)


def q4_k_m(name: str) -> str:
    """The mixture of llama.cpp's Q4_K_M."""
    return "Q6_K" if name == "output.weight" or "attn_v" in name else "Q4_K"


def test_blocks_by_hand() -> None:
    half = list(np.array([0.5], np.float16).view(np.uint8))
    low, high = range(16), range(15, -1, -1)
    pairs = [a | b << 4 for a, b in zip(low, high, strict=True)]
    weight = weight_of(torch.tensor([half + pairs], dtype=torch.uint8), "Q4_0")
    assert weight.dequantize().tolist() == [[(q - 8) / 2 for q in (*low, *high)]]
    signed = [number % 256 for number in range(-16, 16)]
    weight = weight_of(torch.tensor([half + signed], dtype=torch.uint8), "Q8_0")
    assert weight.dequantize().tolist() == [[number / 2 for number in range(-16, 16)]]


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_are_what_the_package_reads(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (5, 3 * block_bytes), dtype=np.uint8)
    by_block = blocks.reshape(5, 3, block_bytes)
    places = {"Q6_K": [208], "Q4_0": [0], "Q5_0": [0], "Q8_0": [0]}.get(kind, [0, 2])
    for place in places:
        scales = np.random.default_rng(place).normal(size=(5, 3, 1)).astype(np.float16)
        by_block[..., place : place + 2] = scales.view(np.uint8)
    weight = weight_of(torch.from_numpy(blocks), kind)
    expected = gguf.quants.dequantize(blocks, number)
    assert weight.num_inputs == 3 * block_size
    assert weight.bits == (4 if kind.startswith("Q4") else 8)
    assert weight.group_size == (16 if kind == "Q6_K" else 32)
    assert not weight.int8_activations
    np.testing.assert_allclose(weight.dequantize().numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "tied", "kind"),
    [("llama", False, "Q4_K_M"), ("llama", True, "Q8_0"), ("qwen3", False, "F16")],
)
def test_weights_are_those_of_the_file(family: str, tied: bool, kind: str, tmp_path: Path) -> None:
    file = models.write_gguf(
        getattr(models, family)(tied), tmp_path, q4_k_m if kind == "Q4_K_M" else lambda name: kind
    )
    make_folder(file, tmp_path / "served")
    model = load(tmp_path / "served")
    pack_quantized(model.network, model.quantized, Implementation.TORCH)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "expected").state_dict()
    found = model.network.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
async def test_equals_generate_on_the_dequantised_weights(
    family: str, tied: bool, tmp_path: Path
) -> None:
    file = models.write_gguf(getattr(models, family)(tied), tmp_path, q4_k_m)
    make_folder(file, tmp_path / "served")
    async with served_model(tmp_path / "served", dtype="float32") as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        sequence = Sequence(row=0, tokens=list(_PROMPT), num_prompt_tokens=len(_PROMPT))
        await Driver(lane).run([sequence], 16)
    expected = Reference(tmp_path / "expected").generate(_PROMPT, 16)
    assert len(set(expected)) >= 6
    assert sequence.tokens[len(_PROMPT) :] == expected


def test_the_folder_of_a_file(tmp_path: Path) -> None:
    file = models.write_gguf(models.llama(), tmp_path, lambda name: "Q8_0")
    make_folder(file, tmp_path / "served")
    make_folder(file, tmp_path / "served")
    served = load_files(str(tmp_path / "served"), None)
    assert served.vocab_size == 288
    assert served.max_positions == 96
    assert served.eos_token_ids == (2,)
    assert served.chat_template is not None
    encoded = served.tokenizer.encode("abc", add_special_tokens=False)
    assert encoded.tokens == ["ab", "c"]
    assert served.tokenizer.decode(encoded.ids) == "abc"
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert (config["dtype"], config["head_dim"]) == ("bfloat16", 64)
    model = load_model(str(tmp_path / "served"), None, "auto", torch.device("cpu"), None)
    assert model.dtype == torch.bfloat16


def ends_of(family: str, folder: Path, last: tuple[str, ...], **ids: int | None) -> tuple[int, ...]:
    """Where generation ends by the gateway, for a file with these last tokens and ids."""
    config = getattr(models, family)()
    tokens = [*models.tokens_of(config.vocab_size)[: -len(last) or None], *last]
    own = {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()}
    metadata = {"tokenizer.ggml.tokens": tokens} | own
    make_folder(models.write_gguf(config, folder, lambda name: "F32", metadata), folder / "served")
    return load_files(str(folder / "served"), None).eos_token_ids


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_generation_ends_at_the_ids_of_the_file(family: str, tmp_path: Path) -> None:
    ids = {"bos": 4, "eos": 7, "eot": 9, "eom": 8}
    assert ends_of(family, tmp_path, (), **ids) == (7, 9, 8)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (4, [7, 9, 8])


@pytest.mark.parametrize(
    ("family", "token"),
    [
        *(("llama", token) for token in ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
        *(("qwen2", token) for token in ("<|im_end|>", "<|endoftext|>")),
        *(("gemma2", "<end_of_turn>"), ("gemma3", "<end_of_turn>"), ("phi3", "<|end|>")),
    ],
)
def test_generation_ends_at_known_tokens_of_the_vocabulary(
    family: str, token: str, tmp_path: Path
) -> None:
    assert ends_of(family, tmp_path / "message", ("x", token), eos=7) == (7, 287)
    assert ends_of(family, tmp_path / "text", ("x", token), eos=287) == (287,)


def test_ends_that_a_file_does_not_have(tmp_path: Path) -> None:
    assert ends_of("llama", tmp_path / "none", (), eos=None, bos=None) == ()
    assert ends_of("llama", tmp_path / "message", ("<|eot_id|>",), eos=None) == (287,)
    assert ends_of("llama", tmp_path / "other", (), eos=7, eot=288, eom=2**32 - 1) == (7,)


def test_a_vocabulary_of_sentencepiece_has_llama_cpps_ids(tmp_path: Path) -> None:
    tokens = [*models.SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab"]
    tokens += [f"<unused{number}>" for number in range(288 - len(tokens))]
    own = {
        **{"model": "llama", "tokens": tokens, "scores": [0.0] * 288},
        **dict.fromkeys(("pre", "merges", "token_type", "bos_token_id", "eos_token_id")),
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    file = models.write_gguf(models.phi3(), tmp_path, lambda name: "F32", metadata)
    make_folder(file, tmp_path / "served")
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type yarn, which cannot be converted"),
        ({"split.count": 3}, "one of several parts"),
    ],
)
def test_metadata_that_are_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = models.write_gguf(models.llama(), tmp_path, lambda name: "F16", metadata)
    with pytest.raises(ModelError, match=message):
        make_folder(file, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture mamba; served are llama, qwen2"):
        make_folder(file, tmp_path / "served")


def served_folder(tmp_path: Path, kind: str = "Q8_0") -> Path:
    folder = tmp_path / "served"
    make_folder(models.write_gguf(models.llama(), tmp_path, lambda name: kind), folder)
    return folder


def test_types_that_are_not_served(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"token_embd.* is Q3_K; served are F32, F16, .*, Q6_K"):
        load(served_folder(tmp_path, "Q3_K"))


@pytest.mark.parametrize("kept", [0, 3, 30, 5_000, 200_000])
def test_truncated_files(kept: int, tmp_path: Path) -> None:
    folder = served_folder(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        load(folder)


def test_rows_that_do_not_fit_the_heads(tmp_path: Path) -> None:
    heads = {"llama.attention.head_count_kv": 7}
    file = models.write_gguf(models.llama(), tmp_path, lambda name: "F32", heads)
    make_folder(file, tmp_path / "served")
    with pytest.raises(ModelError, match=r"attn_k\.weight: 128 rows, which do not fit the heads"):
        load(tmp_path / "served")


def test_a_config_of_another_model(tmp_path: Path) -> None:
    folder = served_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 640}))
    with pytest.raises(ModelError, match=r"mlp.*: \[.*512.*\] in the checkpoint, not \[.*640"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"no model\.layers\.2\.input_layernorm.* and 6 more"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no tensor blk\.1\."):
        load(folder)


def test_a_link_to_another_file_is_replaced(tmp_path: Path) -> None:
    old, new = (
        models.write_gguf(models.llama(), tmp_path / name, lambda name: "Q8_0") for name in "ab"
    )
    link = tmp_path / "served" / "model.gguf"
    for file in (old, new):
        make_folder(file, link.parent)
        assert link.samefile(file)
    new.rename(tmp_path / "b" / "moved")
    make_folder(old, link.parent)
    assert link.samefile(old)


def test_a_file_in_the_place_of_the_link_is_kept(tmp_path: Path) -> None:
    file = models.write_gguf(models.llama(), tmp_path, lambda name: "Q8_0")
    other = tmp_path / "served" / "model.gguf"
    other.parent.mkdir()
    other.write_bytes(b"other")
    with pytest.raises(ModelError, match=r"served: cannot be written: model\.gguf is another file"):
        make_folder(file, other.parent)
    assert other.read_bytes() == b"other"
    assert list(other.parent.iterdir()) == [other]
    # A file beside its own config.
    make_folder(file, tmp_path)
    assert not file.is_symlink()


def test_a_folder_has_one_file(tmp_path: Path) -> None:
    folder = served_folder(tmp_path)
    (folder / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"several \*\.gguf files: model.gguf, other.gguf"):
        load(folder)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = served_folder(tmp_path)
    monkeypatch.setattr("worker_svc.model.quantized.gguf_file.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"need the package gguf: pip install 'quire\[gguf\]'"):
        load(folder)


def test_scales_of_caches_are_not_sought_in_it(tmp_path: Path) -> None:
    assert read_scales([served_folder(tmp_path) / "model.gguf"], 2) is None


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", LlamaConfig),
        ("qwen2", Qwen2Config),
        ("qwen3", Qwen3Config),
        ("gemma2", Gemma2Config),
        ("gemma3", Gemma3TextConfig),
        ("phi3", Phi3Config),
    ],
)
def test_every_parameter_has_a_name_in_files(architecture: str, config: Any) -> None:
    one_layer = config(num_hidden_layers=1)
    network_class = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    names = gguf_file.parameter_names(architecture, network_class, one_layer)
    with torch.device("meta"):
        parameters = set(network_class(one_layer).state_dict())
    # Always tied to the embedding.
    tied = {"lm_head.weight"} if architecture == "gemma2" else set()
    assert parameters - {*names.values()} == tied
    assert architecture in gguf_file.ARCHITECTURES


def test_norms_of_gemma_are_stored_plus_one() -> None:
    tensor = GgufTensor("blk.0.attn_norm.weight", "F32", (2,), np.float32([1.5, 3]).view(np.uint8))
    processor = gguf_file.TENSOR_PROCESSORS["gemma2"]({})
    assert gguf_file.plain_tensor(tensor, processor).tolist() == [0.5, 2.0]

"""Tiny GGUF files, made by the package `gguf`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-6,
    "vocab_size": 288,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The names of llama.cpp.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def llama(tied: bool = False, **changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**_SIZES, **changes}, tie_word_embeddings=tied)


def qwen2(tied: bool = False, **changes: Any) -> Qwen2Config:
    return Qwen2Config(**{**_SIZES, **changes}, tie_word_embeddings=tied)


def qwen3(tied: bool = False, **changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**_SIZES, "head_dim": 64, **changes}, tie_word_embeddings=tied)


def gemma2(tied: bool = True, **changes: Any) -> Gemma2Config:
    sizes = {**_SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, **changes}
    return Gemma2Config(**sizes, tie_word_embeddings=tied)


def gemma3(tied: bool = True, **changes: Any) -> Gemma3TextConfig:
    sizes = {**_SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, **changes}
    return Gemma3TextConfig(**sizes, tie_word_embeddings=tied)


def phi3(tied: bool = False, **changes: Any) -> Phi3Config:
    return Phi3Config(**{**_SIZES, "pad_token_id": 0, **changes}, tie_word_embeddings=tied)


def blocks_of(weight: np.ndarray, kind: str) -> np.ndarray:
    """The weight in blocks of a type. The package writes no blocks of 256; other than two types of
    them are zeros here."""
    number = GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return quantize(weight, number)
    block_size, block_bytes = GGML_QUANT_SIZES[number]
    rows = weight.reshape(-1, block_size)
    writers = {"Q4_K": _q4_k, "Q6_K": _q6_k}
    blocks = writers[kind](rows) if kind in writers else np.zeros((len(rows), block_bytes), "u1")
    return blocks.reshape(len(weight), -1)


def _q4_k(rows: np.ndarray) -> np.ndarray:
    groups = rows.reshape(-1, 8, 32)
    low, high = groups.min(-1).clip(max=0), groups.max(-1)
    scales, minima = (high - low) / 15, -low
    step, low_step = (_half(numbers.max(-1) / 63) for numbers in (scales, minima))
    scales = (scales / step).round().astype(np.uint8)
    minima = (minima / low_step).round().astype(np.uint8)
    shifted = groups + (low_step * minima)[..., None]
    values = (shifted / (step * scales)[..., None]).round().clip(0, 15).astype(np.uint8)
    packed = [
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
    ]
    nibbles = values[:, ::2] | values[:, 1::2] << 4
    return np.hstack([_bytes(step), _bytes(low_step), *packed, nibbles.reshape(-1, 128)])


def _q6_k(rows: np.ndarray) -> np.ndarray:
    groups = rows.reshape(-1, 16, 16)
    scales = np.abs(groups).max(-1) / 31
    step = _half(scales.max(-1) / 127)
    scales = (scales / step).round().astype(np.int8)
    values = (groups / (step * scales)[..., None]).round().clip(-32, 31) + 32
    quarters = values.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    lower = low[:, :, :2] | low[:, :, 2:] << 4
    parts = [lower.reshape(-1, 128), upper.reshape(-1, 64), scales.view(np.uint8), _bytes(step)]
    return np.hstack(parts)


def _half(numbers: np.ndarray) -> np.ndarray:
    """Rounded to float16, in a column."""
    return numbers.astype(np.float16).astype(np.float32)[:, None]


def _bytes(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float16).view(np.uint8)


def write_gguf(
    config: Any,
    folder: Path,
    kind_of: Callable[[str], str],
    metadata: Mapping[str, Any] = {},
) -> Path:
    """`folder/model.gguf` with tensors of these types, by their names in the file, and the float32
    model that it stands for in `folder/expected`. `metadata` are added; None removes a key."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    is_gemma = config.model_type.startswith("gemma")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif is_gemma and "embed" in name:
            # Otherwise the model repeats its last token, as its input is scaled.
            parameter.data.mul_(0.05)
    writer = _writer(config, folder / "model.gguf", metadata)
    for name, parameter in model.named_parameters():
        own = _gguf_name(name, _NAMES | _GEMMA_NAMES if is_gemma else _NAMES)
        weight = parameter.data.numpy().copy()
        if weight.ndim == 1:
            writer.add_tensor(own, weight + 1 if is_gemma else weight)
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        permuted = config.model_type == "llama" and name.split(".")[-2] in heads
        if permuted:
            weight = _interleaved(weight, heads[name.split(".")[-2]])
        kind = kind_of(own)
        number = GGMLQuantizationType[kind]
        data = weight if kind == "F32" else blocks_of(weight, kind)
        writer.add_tensor(own, data, raw_dtype=number)
        found = weight if kind == "F32" else dequantize(data, number)
        if permuted:
            found = _halved(found, heads[name.split(".")[-2]])
        parameter.data = torch.from_numpy(np.ascontiguousarray(found)).view_as(parameter)
    folder.mkdir(exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_pretrained(folder / "expected")
    return folder / "model.gguf"


def _writer(config: Any, path: Path, metadata: Mapping[str, Any]) -> GGUFWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    architecture = config.model_type.removesuffix("_text")
    writer = GGUFWriter(path, architecture)
    own = {f"{architecture}.{key}": value for key, value in _own_metadata(config).items()}
    own |= _tokenizer_metadata(config.vocab_size)
    for key, value in ({"general.name": "tiny"} | own | dict(metadata)).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    return writer


def _own_metadata(config: Any) -> dict[str, Any]:
    """What llama.cpp writes of a config, by keys without the architecture."""
    rotary = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rotary["rope_theta"]),
        "rope.scaling.type": "linear" if rotary["rope_type"] == "linear" else None,
        "rope.scaling.factor": rotary.get("factor"),
        "vocab_size": config.vocab_size,
    }


def tokens_of(vocab_size: int) -> list[str]:
    """A byte-level BPE vocabulary without merges but `ab`."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    tokens = [*SPECIAL_TOKENS, *letters, "ab"]
    return tokens + [f"<unused{number}>" for number in range(vocab_size - len(tokens))]


def _tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens_of(vocab_size),
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 257 + [5] * (vocab_size - 260),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def _gguf_name(name: str, names: Mapping[str, str]) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, _, number, *inner, suffix = name.split(".")
    return f"blk.{number}.{names['.'.join(inner)]}.{suffix}"


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of heads as llama.cpp's rotary embedding takes them: pairs side by side."""
    heads = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def _halved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The reverse: pairs half a head apart."""
    heads = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)

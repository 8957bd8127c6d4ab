"""Tiny GGUF files, made by the package `gguf`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def llama(tied: bool = False) -> LlamaConfig:
    return LlamaConfig(**_SIZES, tie_word_embeddings=tied)


def qwen3(tied: bool = False) -> Qwen3Config:
    return Qwen3Config(**_SIZES, head_dim=64, tie_word_embeddings=tied)


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
    model that it stands for in `folder/expected`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    writer = _writer(config, folder / "model.gguf", metadata)
    for name, parameter in model.named_parameters():
        own = _gguf_name(name)
        weight = parameter.data.numpy().copy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        permuted = config.model_type == "llama" and name.split(".")[-2] in heads
        if permuted:
            weight = _interleaved(weight, heads[name.split(".")[-2]])
        kind = "F32" if weight.ndim == 1 else kind_of(own)
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
    writer = GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size)
    for key, value in metadata.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    return writer


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """A byte-level BPE vocabulary without merges but `ab`."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + number) for number in range(256 - len(letters))]
    tokens = [*SPECIAL_TOKENS, *letters, "ab"]
    tokens += [f"<unused{number}>" for number in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257 + [5] * (vocab_size - 260))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")


def _gguf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, _, number, *inner, suffix = name.split(".")
    return f"blk.{number}.{_NAMES['.'.join(inner)]}.{suffix}"


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of heads as llama.cpp's rotary embedding takes them: pairs side by side."""
    heads = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def _halved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The reverse: pairs half a head apart."""
    heads = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)

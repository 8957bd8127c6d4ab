"""Tiny quantised checkpoints, written by the layouts that the formats document, and the models that
they stand for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import VOCAB_SIZE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

# Of AWQ: the output in each four bits of an integer, the lowest first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class QuantizedLayer:
    """The tensors of a layer by the last part of their names, and the weight that they encode."""

    tensors: Mapping[str, Tensor]
    weight: Tensor


@dataclass(frozen=True)
class Format:
    """How layers are written, and the `quantization_config`."""

    layer: Callable[[Tensor], QuantizedLayer]
    config: Mapping[str, Any]
    other_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_checkpoint(
    form: Format,
    folder: Path,
    *,
    tied: bool = False,
    num_layers: int = 2,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """A model whose decoder layers are quantised, in `folder`, and the model that it stands for in
    `folder/expected`."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            nn.init.normal_(module.bias) if module.bias is not None else None
            layer = form.layer(state.pop(f"{name}.weight"))
            module.weight.data.copy_(layer.weight)
            state |= {f"{name}.{key}": tensor for key, tensor in layer.tensors.items()}
            if module.bias is not None:
                state[f"{name}.bias"] = module.bias.detach().clone()
    model.save_pretrained(folder / "expected")
    written = json.loads((folder / "expected" / "config.json").read_text())
    if form.config:
        written["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(written))
    for name, content in form.other_files.items():
        (folder / name).write_text(json.dumps(content))
    save_file({key: t.contiguous() for key, t in state.items()}, folder / "model.safetensors")
    return folder


def rewrite_config(folder: Path, **changes: Any) -> None:
    """Change the `quantization_config`."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config["quantization_config"], **changes}
    (folder / "config.json").write_text(json.dumps(config))


def packed(integers: Tensor, bits: int) -> Tensor:
    """Adjacent columns in one int32, the first in the lowest bits."""
    per_word = 32 // bits
    columns = -(-integers.shape[1] // per_word)
    words = torch.zeros(integers.shape[0], columns, dtype=torch.int64)
    for column in range(integers.shape[1]):
        shifted = integers[:, column].long() << bits * (column % per_word)
        words[:, column // per_word] |= shifted
    return words.to(torch.int32)


def rounded(
    weight: Tensor, bits: int, group_size: int, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0 `[outputs, inputs]`, float16 scales and integer zeros `[outputs, groups]`."""
    largest = 2**bits - 1
    groups = weight.view(len(weight), -1, group_size)
    if symmetric:
        scales = groups.abs().amax(-1) / (largest // 2)
        scales = scales.half()
        zeros = torch.full_like(scales, (largest + 1) // 2, dtype=torch.int64)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / largest).half()
        zeros = (-low / scales.float()).round().long().clamp(1, largest)
    values = (groups / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return values.clamp(0, largest).long().flatten(1), scales, zeros


def dequantized(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = values.view(len(values), scales.shape[1], -1) - zeros.unsqueeze(-1)
    return (groups * scales.float().unsqueeze(-1)).flatten(1)


def gptq(
    bits: int = 4,
    group_size: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    version: int = 1,
    in_config: bool = True,
) -> Format:
    def layer(weight: Tensor) -> QuantizedLayer:
        size = weight.shape[1] if group_size == -1 else group_size
        order = torch.randperm(weight.shape[1]) if act_order else torch.arange(weight.shape[1])
        values, scales, zeros = rounded(weight[:, order], bits, size, symmetric=symmetric)
        groups = torch.empty_like(order)
        groups[order] = torch.arange(len(order)) // size
        unordered = order.argsort()
        tensors = {
            "qweight": packed(values[:, unordered], bits).t(),
            "qzeros": packed((zeros - (1 if version == 1 else 0)).t(), bits),
            "scales": scales.t(),
            "g_idx": groups.int(),
        }
        # Packed along the inputs: a word has adjacent inputs of one output.
        return QuantizedLayer(tensors, dequantized(values, scales, zeros)[:, unordered])

    config: dict[str, Any] = {
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    if not in_config:
        return Format(layer, {}, {"quantize_config.json": config})
    return Format(layer, {**config, "quant_method": "gptq"})


def awq(group_size: int = 32) -> Format:
    def eights(integers: Tensor) -> Tensor:
        columns = torch.arange(integers.shape[1]).view(-1, 8)[:, list(_AWQ_ORDER)].flatten()
        return packed(integers[:, columns], 4)

    def layer(weight: Tensor) -> QuantizedLayer:
        values, scales, zeros = rounded(weight, 4, group_size, symmetric=False)
        tensors = {
            "qweight": eights(values.t()),
            "qzeros": eights(zeros.t()),
            "scales": scales.t(),
        }
        return QuantizedLayer(tensors, dequantized(values, scales, zeros))

    config = {"bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Format(layer, {**config, "quant_method": "awq"})


def compressed(
    bits: int,
    group_size: int | None = None,
    *,
    symmetric: bool = True,
    int8_activations: bool = False,
    format_name: str = "pack-quantized",
) -> Format:
    """`group_size` None has one scale per output."""

    def layer(weight: Tensor) -> QuantizedLayer:
        size = group_size or weight.shape[1]
        values, scales, zeros = rounded(weight, bits, size, symmetric=symmetric)
        scales, half = scales.bfloat16(), 2 ** (bits - 1)
        tensors = {"weight_scale": scales}
        if format_name == "pack-quantized":
            tensors["weight_packed"] = packed(values, bits)
            tensors["weight_shape"] = torch.tensor(weight.shape)
            if not symmetric:
                tensors["weight_zero_point"] = packed(zeros.t(), bits).t()
        else:
            tensors["weight"] = (values - half).to(torch.int8)
            if not symmetric:
                tensors["weight_zero_point"] = (zeros - half).to(torch.int8)
        return QuantizedLayer(tensors, dequantized(values, scales, zeros))

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
    }
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations if int8_activations else None,
    }
    return Format(
        layer,
        {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        },
    )


FORMATS: Mapping[str, Format] = {
    "gptq-4": gptq(),
    "gptq-4-act-order": gptq(4, 64, act_order=True, symmetric=False),
    "gptq-4-one-group": gptq(4, -1, act_order=True),
    "gptq-4-v2": gptq(4, 128, symmetric=False, version=2),
    "gptq-4-file": gptq(in_config=False),
    "gptq-8": gptq(8, 64, symmetric=False),
    "awq": awq(),
    "awq-128": awq(128),
    "w8a8": compressed(8, int8_activations=True, format_name="int-quantized"),
    "w8a8-zeros": compressed(
        8, symmetric=False, int8_activations=True, format_name="int-quantized"
    ),
    "w8a16": compressed(8),
    "w8a16-plain": compressed(8, 32, format_name="naive-quantized"),
    "w4a16": compressed(4, 128),
    "w4a16-zeros": compressed(4, 32, symmetric=False),
    "w4a16-channel": compressed(4),
}

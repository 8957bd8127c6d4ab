"""`python -m benchmarks.engines.types.make_compressed MODEL TYPE FOLDER` quantises a model.

Writes it in the format compressed-tensors. `int8`: symmetric weights with one scale per output,
inputs quantised per token (W8A8). `int4`: symmetric weights in groups of 128 inputs (W4A16).
Embeddings, and with them the output layer, keep their type.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.engines.types.variants import INT8

_GROUP = 128
_PER_WORD = 8  # numbers of 4 bits in 32 bits
_FILE = "model.safetensors"


def main(model: Path, kind: str, folder: Path) -> None:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model / name, folder)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = _scheme(kind)
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(model / _FILE).items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            parts = int8(weight) if kind == INT8 else int4(weight)
            tensors |= {f"{stem}{part}": tensor for part, tensor in parts.items()}
        else:
            tensors[name] = weight
    save_file(tensors, folder / _FILE, {"format": "pt"})


def int8(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    values = (weight.float() / scales).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scales.to(weight.dtype)}


def int4(weight: Tensor) -> dict[str, Tensor]:
    num_outputs, num_inputs = weight.shape
    groups = weight.float().view(num_outputs, -1, _GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 7
    values = (groups / scales).round().clamp(-8, 7).to(torch.int32).view(num_outputs, -1) + 8
    words = torch.zeros(num_outputs, num_inputs // _PER_WORD, dtype=torch.int32)
    for at in range(_PER_WORD):
        words |= values[:, at::_PER_WORD] << 4 * at
    return {
        "weight_packed": words,
        "weight_scale": scales.squeeze(-1).to(weight.dtype),
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }


def _scheme(kind: str) -> dict[str, object]:
    """The entry `quantization_config` of `config.json`."""
    of_weights = {"type": "int", "symmetric": True, "dynamic": False}
    if kind == INT8:
        weights = {**of_weights, "num_bits": 8, "strategy": "channel"}
        inputs = {
            "type": "int",
            "symmetric": True,
            "dynamic": True,
            "num_bits": 8,
            "strategy": "token",
        }
    else:
        weights = {**of_weights, "num_bits": 4, "strategy": "group", "group_size": _GROUP}
        inputs = None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == INT8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

"""`python tests/support/write_with_gptqmodel.py FOLDER` quantises a tiny model with GPTQModel.

Runs on a CPU, in an environment with GPTQModel. Each case gets a folder with the checkpoint as
GPTQModel saves it, and `library/expected.safetensors`: the weights of the layers as its torch
kernels dequantise them, and its logits for a prompt.
"""

import os
import sys
from pathlib import Path
from typing import Any

# Its packing in Python is what it falls back to without a compiler.
os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"
# Its default on two cores, one, is too few for its pools of threads.
os.environ["GPTQMODEL_CPU_WORKERS"] = "2"

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.quantization.config import FORMAT, METHOD
from library_model import PROMPT, calibration_texts, write_model
from safetensors.torch import save_file

_CASES: dict[str, dict[str, Any]] = {
    "gptq-4": {"bits": 4},
    "gptq-4-act-order": {"bits": 4, "desc_act": True},
    "gptq-4-asymmetric": {"bits": 4, "sym": False},
    "gptq-4-v2": {"bits": 4, "sym": False, "desc_act": True, "format": FORMAT.GPTQ_V2},
    "gptq-8-asymmetric-act-order": {"bits": 8, "sym": False, "desc_act": True},
    "awq-gptqmodel": {"bits": 4, "sym": False, "method": METHOD.AWQ, "format": FORMAT.GEMM},
    "awq-gptqmodel-symmetric": {
        "bits": 4,
        "sym": True,
        "method": METHOD.AWQ,
        "format": FORMAT.GEMM,
    },
}
_GROUP_SIZE = 32


def write_case(model: Path, folder: Path, settings: dict[str, Any]) -> None:
    awq = settings.get("method") == METHOD.AWQ
    config = QuantizeConfig(group_size=_GROUP_SIZE, device="cpu", offload_to_disk=False, **settings)
    quantized = GPTQModel.load(str(model), config, dtype=torch.float16)
    texts = [{"input_ids": text, "attention_mask": [1] * len(text)} for text in calibration_texts()]
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    quantized.quantize(texts, batch_size=8, backend=backend)
    quantized.save(str(folder))
    (folder / "library").mkdir()
    save_file(expected(folder, backend), folder / "library" / "expected.safetensors")


@torch.inference_mode()
def expected(folder: Path, backend: BACKEND) -> dict[str, torch.Tensor]:
    """Weights `[outputs, inputs]` in float16 by the name of the layer, and `logits`."""
    loaded = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16)
    tensors = {
        f"{name}.weight": _weight(layer).t().contiguous().clone()
        for name, layer in loaded.model.named_modules()
        if isinstance(layer, BaseQuantLinear)
    }
    tensors["logits"] = loaded.model(torch.tensor([PROMPT])).logits[0].clone()
    return tensors


def _weight(layer: BaseQuantLinear) -> torch.Tensor:
    """`[inputs, outputs]`."""
    if isinstance(layer, TorchLinear):
        return layer.dequantize_weight()
    stored = (layer.qweight, layer.qzeros, layer.scales)
    return dequantize_gemm(*stored, layer.bits, layer.group_size)


def main(folder: Path) -> None:
    write_model(folder / "model")
    for name, settings in _CASES.items():
        write_case(folder / "model", folder / name, settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

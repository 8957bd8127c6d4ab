"""`python tests/support/write_with_autoawq.py FOLDER` quantises a tiny model with AutoAWQ.

Runs on a CPU, in an environment with AutoAWQ. Each case gets a folder with the checkpoint as
AutoAWQ saves it, and `library/expected.safetensors`: the weights of the layers as AutoAWQ
dequantises them, and its logits for a prompt.
"""

import sys
from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.modules.linear import gemm
from awq.utils.packing_utils import dequantize_gemm
from library_model import PROMPT, calibration_texts, write_model
from safetensors.torch import save_file

_GROUP_SIZES = (32, 64)
# Triton's kernels, which it prefers, need a GPU.
gemm.TRITON_AVAILABLE = False


def write_case(model: Path, folder: Path, group_size: int) -> None:
    quantized = AutoAWQForCausalLM.from_pretrained(str(model), torch_dtype=torch.float16)
    texts = calibration_texts()
    quantized.quantize(
        None,
        quant_config={
            "zero_point": True,
            "q_group_size": group_size,
            "w_bit": 4,
            "version": "GEMM",
        },
        calib_data=texts,
        max_calib_samples=len(texts),
        max_calib_seq_len=len(texts[0]),
    )
    quantized.save_quantized(str(folder))
    (folder / "library").mkdir()
    save_file(expected(quantized.model), folder / "library" / "expected.safetensors")


@torch.inference_mode()
def expected(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights `[outputs, inputs]` in float16 by the name of the layer, and `logits`."""
    tensors = {
        f"{name}.weight": dequantize_gemm(
            layer.qweight, layer.qzeros, layer.scales, layer.w_bit, layer.group_size
        )
        .t()
        .contiguous()
        for name, layer in model.named_modules()
        if isinstance(layer, gemm.WQLinear_GEMM)
    }
    tensors["logits"] = model(torch.tensor([PROMPT])).logits[0].clone()
    return tensors


def main(folder: Path) -> None:
    write_model(folder / "model")
    for group_size in _GROUP_SIZES:
        write_case(folder / "model", folder / f"awq-{group_size}", group_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

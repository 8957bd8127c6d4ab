"""Weights that the package compressed-tensors wrote are those that it reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors
from worker_svc.model.quantized.formats import find_weights

pytest.importorskip("compressed_tensors")
compressors = pytest.importorskip("compressed_tensors.compressors")
schemes = pytest.importorskip("compressed_tensors.quantization")


def scales_of(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> dict[str, Tensor]:
    groups = weight.view(len(weight), -1, group_size)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        return {"weight_scale": groups.abs().amax(-1) / high}
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (most - least) / (high - low)
    zero = (low - least / scale).round().clamp(low, high).to(torch.int8)
    return {"weight_scale": scale, "weight_zero_point": zero}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("format_name", "bits", "group_size"),
    [
        *(("pack-quantized", bits, size) for bits in (4, 8) for size in (None, 32)),
        ("int-quantized", 8, None),
    ],
)
def test_weights(
    format_name: str, bits: int, group_size: int | None, symmetric: bool, tmp_path: Path
) -> None:
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
    }
    activations: dict[str, Any] | None = None
    if format_name == "int-quantized":
        activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    scheme = schemes.QuantizationScheme(**group)
    compressor = compressors.BaseCompressor.get_value_from_registry(format_name)
    torch.manual_seed(0)
    weight = torch.randn(52, 128)
    state = {"weight": weight, **scales_of(weight, bits, group_size or 128, symmetric)}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    file = tmp_path / "model.safetensors"
    save_file({f"layer.{key}": tensor.contiguous() for key, tensor in stored.items()}, file)
    config = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
    }
    found = find_weights(config, CheckpointTensors([file]))["layer"].read()
    assert found.int8_activations == (activations is not None)
    torch.testing.assert_close(found.dequantize(), expected.float(), rtol=1e-6, atol=1e-6)

"""Scales of 8-bit caches: from checkpoints, or from what a run showed."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker_svc.cache.kv_scales import KvMaxima, KvScales, read_scales, scales_of_maxima
from worker_svc.model.checkpoint import ModelError

_LLM_COMPRESSOR = ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale")
_MODEL_OPT = (
    "model.layers.{}.self_attn.k_proj.k_scale",
    "model.layers.{}.self_attn.v_proj.v_scale",
)
_QUARK = (
    "model.layers.{}.self_attn.k_proj.output_scale",
    "model.layers.{}.self_attn.v_proj.output_scale",
)
_GPT = ("transformer.h.{}.attn.k_scale", "transformer.h.{}.attn.v_scale")


def checkpoint(folder: Path, tensors: dict[str, float | list[float]], name: str = "model") -> Path:
    path = folder / f"{name}.safetensors"
    save_file({key: torch.tensor(value) for key, value in tensors.items()}, path)
    return path


@pytest.mark.parametrize("names", [_LLM_COMPRESSOR, _MODEL_OPT, _QUARK, _GPT])
def test_every_known_name(tmp_path: Path, names: tuple[str, str]) -> None:
    # Eleven layers: their numbers are no strings to be sorted.
    tensors: dict[str, float | list[float]] = {}
    for layer in range(11):
        tensors[names[0].format(layer)] = 0.25 + layer
        tensors[names[1].format(layer)] = [0.5 + layer]
        tensors[f"model.layers.{layer}.self_attn.k_proj.weight_scale"] = 9.0
    scales = read_scales([checkpoint(tmp_path, tensors)], 11)
    assert scales == tuple(KvScales(0.25 + layer, 0.5 + layer) for layer in range(11))


def test_one_scale_for_keys_and_values_in_several_files(tmp_path: Path) -> None:
    files = [
        checkpoint(tmp_path, {f"model.layers.{layer}.self_attn.kv_scale": 2.0 + layer}, str(layer))
        for layer in range(2)
    ]
    assert read_scales(files, 2) == (KvScales(2.0, 2.0), KvScales(3.0, 3.0))


def test_the_largest_of_a_scale_per_head(tmp_path: Path) -> None:
    tensors: dict[str, float | list[float]] = {
        "model.layers.0.self_attn.k_scale": [0.5, 4.0],
        "model.layers.0.self_attn.v_scale": [1.0, 0.25],
    }
    assert read_scales([checkpoint(tmp_path, tensors)], 1) == (KvScales(4.0, 1.0),)


def test_layers_of_other_parts_do_not_count(tmp_path: Path) -> None:
    tensors: dict[str, float | list[float]] = {
        "mtp.layers.0.self_attn.kv_scale": 7.0,
        "model.layers.0.self_attn.kv_scale": 1.0,
        "model.layers.1.self_attn.kv_scale": 2.0,
        # One more than the model has: those that predict further tokens.
        "model.layers.2.self_attn.kv_scale": 3.0,
    }
    assert read_scales([checkpoint(tmp_path, tensors)], 2) == (
        KvScales(1.0, 1.0),
        KvScales(2.0, 2.0),
    )


@pytest.mark.parametrize("name", [None, "model.layers.0.self_attn.k_scale"])
def test_none_where_a_layer_has_none(tmp_path: Path, name: str | None) -> None:
    tensors: dict[str, float | list[float]] = {"model.layers.0.mlp.up_proj.weight": 1.0}
    if name is not None:
        tensors[name] = 1.0
    assert read_scales([checkpoint(tmp_path, tensors)], 1) is None


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_invalid_scales(tmp_path: Path, wrong: float) -> None:
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.v_scale is"):
        read_scales([checkpoint(tmp_path, {"layers.0.self_attn.v_scale": wrong})], 1)


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)]
)
def test_maxima_become_the_largest_number(dtype: torch.dtype, largest: float) -> None:
    maxima = [KvMaxima(896.0, 1.5), KvMaxima(0.0, math.nan), KvMaxima(math.inf, 3.0)]
    assert scales_of_maxima(maxima, dtype) == (
        KvScales(896.0 / largest, 1.5 / largest),
        KvScales(1.0, 1.0),
        KvScales(1.0, 3.0 / largest),
    )

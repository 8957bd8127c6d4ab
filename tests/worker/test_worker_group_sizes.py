"""Groups of scales in a checkpoint have the size that its config says, or are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, awq, compressed, gptq, rewrite_config, write_checkpoint

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.loading import LoadedModel, load_model


def load(folder: Path) -> LoadedModel:
    return load_model(str(folder), None, "auto", torch.device("cpu"), None)


def group_sizes(folder: Path) -> set[int]:
    return {source().group_size for source in load(folder).quantized.values()}


def change_of(name: str, group_size: int) -> Mapping[str, Any]:
    if name.startswith("w"):
        return compressed(4, None if group_size == -1 else group_size).config
    return {"group_size": group_size}


@pytest.mark.parametrize(
    ("group_size", "message"),
    [
        (
            64,
            r"8 groups of 256 inputs, so 32 in a group, but by the config a group has 64; correct",
        ),
        (-1, r"8 groups of 256 inputs, so 32 in a group, but by the config a group has 256; cor"),
        (48, r"by the config a group has 48 inputs, which does not divide the layer's 256; quant"),
    ],
)
@pytest.mark.parametrize(
    ("name", "scales"), [("gptq-4", "scales"), ("awq", "scales"), ("w4a16-zeros", "weight_scale")]
)
def test_scales_of_other_groups(
    name: str, scales: str, group_size: int, message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(FORMATS[name], tmp_path)
    rewrite_config(folder, **change_of(name, group_size))
    with pytest.raises(ModelError, match=rf"layers\.0\.mlp\.down_proj\.{scales}: {message}"):
        load(folder)


@pytest.mark.parametrize("name", ["gptq-4", "awq"])
def test_a_size_that_is_none(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(FORMATS[name], tmp_path)
    rewrite_config(folder, group_size=0)
    with pytest.raises(ModelError, match=r"down_proj\.scales: group_size 0 in the config; correct"):
        load(folder)


@pytest.mark.parametrize("name", ["gptq-4", "awq"])
def test_without_a_size_in_the_config_the_shapes_count(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(FORMATS[name], tmp_path)
    rewrite_config(folder, group_size=None)
    assert group_sizes(folder) == {32}


def test_one_group(tmp_path: Path) -> None:
    folder = write_checkpoint(gptq(4, -1), tmp_path)
    assert group_sizes(folder) == {128, 256}


def test_awq_with_the_older_name_of_the_size(tmp_path: Path) -> None:
    folder = write_checkpoint(awq(64), tmp_path)
    rewrite_config(folder, group_size=None, q_group_size=128)
    with pytest.raises(ModelError, match=r"4 groups of 256 inputs, so 64 .* a group has 128"):
        load(folder)


def test_gptq_with_sizes_by_layer(tmp_path: Path) -> None:
    folder = write_checkpoint(gptq(4, 32), tmp_path)
    sizes = {r"-:.*head": {}, r".*mlp": {"group_size": 32}, r"+:.*attn": {"group_size": 32}}
    rewrite_config(folder, group_size=64, dynamic=sizes)
    assert group_sizes(folder) == {32}
    rewrite_config(folder, dynamic={"+:*": {}})
    with pytest.raises(ModelError, match=r"the pattern \+:\* in dynamic: nothing to repeat"):
        load(folder)
    rewrite_config(folder, group_size=32, dynamic={r".*up_proj": {"group_size": 64}})
    with pytest.raises(ModelError, match=r"up_proj\.scales: .* so 32 .* a group has 64"):
        load(folder)


@pytest.mark.parametrize("strategy", ["tensor", "group"])
def test_scales_of_another_strategy(strategy: str, tmp_path: Path) -> None:
    folder = write_checkpoint(FORMATS["w4a16-channel"], tmp_path)
    group_size = 64 if strategy == "group" else None
    weights = {"num_bits": 4, "strategy": strategy, "group_size": group_size}
    rewrite_config(folder, config_groups={"0": {"targets": ["Linear"], "weights": weights}})
    message = {
        "tensor": r"shape \[128, 1\], but the strategy tensor of the config has 1 scale; correct",
        "group": r"1 groups of 256 inputs, so 256 in a group, but by the config a group has 64",
    }
    with pytest.raises(ModelError, match=rf"down_proj\.weight_scale: {message[strategy]}"):
        load(folder)

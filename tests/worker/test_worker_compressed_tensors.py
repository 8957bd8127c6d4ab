"""Weights that the package compressed-tensors wrote are those that it reads, with the scheme that
it chooses."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, compressed, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from worker_svc.model.checkpoint import ModelError
from worker_svc.model.loading import load_model
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors
from worker_svc.model.quantized.config_groups import read_config_groups
from worker_svc.model.quantized.formats import find_weights
from worker_svc.model.quantized.layer_classes import LayerClasses, layer_classes

pytest.importorskip("compressed_tensors")
compressors = pytest.importorskip("compressed_tensors.compressors")
schemes = pytest.importorskip("compressed_tensors.quantization")


def scales_of(weight: Tensor, bits: int, strategy: str, symmetric: bool) -> dict[str, Tensor]:
    """The groups have 32 inputs."""
    groups = weight.view(len(weight), -1, 32 if strategy == "group" else weight.shape[1])
    if strategy == "tensor":
        groups = weight.view(1, -1)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        return {"weight_scale": groups.abs().amax(-1) / high}
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (most - least) / (high - low)
    zero = (low - least / scale).round().clamp(low, high).to(torch.int8)
    return {"weight_scale": scale, "weight_zero_point": zero}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize(
    ("format_name", "bits"), [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8)]
)
def test_weights(
    format_name: str, bits: int, strategy: str, symmetric: bool, tmp_path: Path
) -> None:
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": 32 if strategy == "group" else None,
    }
    activations: dict[str, Any] | None = None
    if format_name == "int-quantized":
        activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    scheme = schemes.QuantizationScheme(**group)
    compressor = compressors.BaseCompressor.get_value_from_registry(format_name)
    torch.manual_seed(0)
    weight = torch.randn(52, 128)
    state = {"weight": weight, **scales_of(weight, bits, strategy, symmetric)}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    file = tmp_path / "model.safetensors"
    save_file({f"layer.{key}": tensor.contiguous() for key, tensor in stored.items()}, file)
    config = {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
    }
    found = find_weights(config, CheckpointTensors([file]), LayerClasses())["layer"].read()
    assert found.int8_activations == (activations is not None)
    torch.testing.assert_close(found.dequantize(), expected.float(), rtol=1e-6, atol=1e-6)


class Decoder(nn.Module):
    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 64)
        self.up = nn.Linear(64, 64)
        self.down = nn.Linear(64, 64)


def _config(targets: dict[int, list[str]], *ignore: str) -> dict[str, Any]:
    """The targets are those of groups in order, each with a group size by which it is known."""
    groups = {
        f"group_{number}": {
            "targets": names,
            "weights": {"num_bits": 4, "strategy": "group", "group_size": group_size},
        }
        for number, (group_size, names) in enumerate(targets.items())
    }
    return {"format": "pack-quantized", "config_groups": groups, "ignore": list(ignore)}


@pytest.mark.parametrize(
    "config",
    [
        _config({8: ["re:.*"], 16: ["down"], 32: ["Linear"]}),
        _config({8: ["Linear"], 16: ["re:.*own"]}),
        _config({8: ["re:.*n"], 16: ["re:.*d", "re:u"], 32: ["re:.*"]}),
        _config({8: ["Linear"], 16: ["Embedding"]}),
        _config({8: ["Module"], 16: ["Linear"]}),
        _config({8: ["Linear", "down"], 16: ["Linear"]}),
        _config({8: ["re:own", "up"]}),
        _config({8: ["Linear", "Embedding"]}, "re:.*down", "embed"),
        _config({8: ["re:.*", "down"]}, "Linear"),
        _config({8: ["LINEAR", "Embed"]}),
    ],
)
def test_a_layer_has_the_group_that_the_library_chooses(config: dict[str, Any]) -> None:
    model = Decoder()
    schemes.apply_quantization_config(
        model, schemes.QuantizationConfig(**config), show_progress=False
    )
    groups, classes = read_config_groups(config), layer_classes(Decoder, None)
    for name, module in model.named_children():
        scheme = getattr(module, "quantization_scheme", None)
        found = groups.group_of(name, classes.classes_of(name))
        assert (scheme is None) == (found is None), name
        if found is not None:
            assert found.group_size == scheme.weights.group_size, name


def test_classes_of_layers_with_another_prefix() -> None:
    classes = layer_classes(Decoder, None)
    assert classes.classes_of("language_model.embed") == ("Embedding", "Module")
    assert classes.classes_of("language_model.down") == ("Linear", "Module")
    assert classes.classes_of("experts.0.gate") == ("Linear", "Module")


def _quantised_embedding(folder: Path, **changes: Any) -> Tensor:
    """Write a checkpoint with linear layers of 4 bits and the embedding of 8 bits, which is
    returned."""
    embedding, linear = compressed(8), FORMATS["w4a16"]
    groups = {
        "linear": linear.config["config_groups"]["group_0"],
        "embedding": {
            **embedding.config["config_groups"]["group_0"],
            "targets": ["Embedding"],
        },
    }
    config = {**linear.config, "config_groups": groups, **changes}
    write_checkpoint(replace(linear, config=config), folder)
    state = load_file(folder / "model.safetensors")
    layer = embedding.layer(state.pop("model.embed_tokens.weight"))
    state |= {f"model.embed_tokens.{name}": tensor for name, tensor in layer.tensors.items()}
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors")
    return layer.weight


def test_groups_of_embeddings_and_of_linear_layers(tmp_path: Path) -> None:
    expected = _quantised_embedding(tmp_path)
    model = load_model(str(tmp_path), None, "auto", torch.device("cpu"), None)
    weights = {type(layer): source() for layer, source in model.quantized.items()}
    assert (weights[nn.Embedding].bits, weights[nn.Linear].bits) == (8, 4)
    torch.testing.assert_close(weights[nn.Embedding].dequantize(), expected)


def test_quantised_weights_that_the_config_leaves_out(tmp_path: Path) -> None:
    _quantised_embedding(tmp_path, ignore=["re:.*embed"])
    with pytest.raises(ModelError, match=r"model\.embed_tokens: a quantised weight, but"):
        load_model(str(tmp_path), None, "auto", torch.device("cpu"), None)


def test_unused_scales_of_a_weight_that_the_config_leaves_out(tmp_path: Path) -> None:
    folder = write_checkpoint(FORMATS["w4a16"], tmp_path)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "lm_head.weight_scale": torch.ones(1)}, folder / "model.safetensors")
    model = load_model(str(folder), None, "auto", torch.device("cpu"), None)
    assert model.network.lm_head.weight.equal(state["lm_head.weight"])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"strategy": "block"}, "strategy block; served are tensor, channel, group"),
        ({"strategy": "group"}, "strategy group and group_size None; correct"),
        ({"strategy": "channel", "group_size": 32}, "strategy channel and group_size 32; correct"),
        ({"group_size": 0}, "strategy group and group_size 0"),
    ],
)
def test_strategies_that_are_refused(weights: dict[str, Any], message: str) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}
    with pytest.raises(ModelError, match=message):
        read_config_groups({"format": "pack-quantized", "config_groups": {"group_0": group}})
    with pytest.raises(ValueError, match=r"."):
        # The library refuses what is not a strategy of its own, too.
        schemes.QuantizationArgs(num_bits=4, **weights)


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ModelError, match=r"the target re:\*: nothing to repeat"):
        read_config_groups(_config({8: ["re:*"]}))


def test_a_preset_group_is_refused() -> None:
    config = {"format": "int-quantized", "config_groups": {"W8A8": ["Linear"]}}
    with pytest.raises(ModelError, match="the group W8A8 is no object; write the scheme"):
        read_config_groups(config)


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_zero_points_that_are_missing(name: str, tmp_path: Path) -> None:
    chosen = FORMATS[name]
    config = copy.deepcopy(chosen.config)
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    folder = write_checkpoint(replace(chosen, config=config), tmp_path)
    with pytest.raises(ModelError, match=r"weight_zero_point is missing, but by the config"):
        load_model(str(folder), None, "auto", torch.device("cpu"), None)


def test_strategies_without_a_name() -> None:
    for group_size, strategy in ((None, "tensor"), (-1, "channel"), (32, "group")):
        weights = {"num_bits": 4, "group_size": group_size}
        config = _config({8: ["Linear"]})
        config["config_groups"]["group_0"]["weights"] = weights
        found = read_config_groups(config).by_target["Linear"].strategy
        assert found == strategy == schemes.QuantizationArgs(**weights).strategy

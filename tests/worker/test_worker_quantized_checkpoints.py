"""Checkpoints that are quantised already: what their weights stand for, what they write, and which
are refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from quantized_checkpoints import FORMATS, compressed, packed, rewrite_config, write_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import Reference
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from triton_devices import DEVICES
from worker_driver import Driver, LaneClient, Sequence, served_model

from kernels.dispatch import Implementation
from worker_svc.errors import WrongSettingError
from worker_svc.model import loading
from worker_svc.model.checkpoint import ModelError, weights_files
from worker_svc.model.loading import LoadedModel, load_model
from worker_svc.model.quantized import formats
from worker_svc.model.quantized.integers import permutation_of, unpack
from worker_svc.model.quantized.network import move_stand_ins
from worker_svc.model.quantized.packing import pack_quantized

_CPU = torch.device("cpu")
_PROMPT = [5, 17, 99, 3, 42, 8, 150, 61, 7, 7, 23]


Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints by the names of their formats."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_checkpoint(FORMATS[name], folder / name) for name in FORMATS}


@pytest.fixture
def write(written: dict[str, Path], tmp_path: Path) -> Write:
    """A checkpoint of a format, to be changed."""

    def copy(name: str) -> Path:
        return copytree(written[name], tmp_path / name)

    return copy


def load(folder: Path, dtype: str = "auto", **options: Any) -> LoadedModel:
    return load_model(str(folder), None, dtype, _CPU, None, **options)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_weights_are_those_that_the_integers_stand_for(name: str, written: dict[str, Path]) -> None:
    folder = written[name]
    model = load(folder)
    assert model.dtype == torch.float32
    bits, int8_activations = (4 if "4" in name or "awq" in name else 8), "a8" in name
    for source in model.quantized.values():
        weight = source()
        assert (weight.bits, weight.int8_activations) == (bits, int8_activations)
        assert (weight.permutation is not None) == (name == "gptq-4-act-order")
    pack_quantized(model.network, model.quantized, Implementation.TORCH)
    expected = AutoModelForCausalLM.from_pretrained(folder / "expected").state_dict()
    found = model.network.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gptq-4-act-order", "awq", "w8a16", "w4a16-zeros"])
async def test_equals_generate_on_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(FORMATS[name], tmp_path, tied=name == "awq")
    async with served_model(folder) as worker:
        lane = LaneClient(worker.stub)
        await lane.open()
        sequence = Sequence(row=0, tokens=list(_PROMPT), num_prompt_tokens=len(_PROMPT))
        await Driver(lane).run([sequence], 16)
    expected = Reference(folder / "expected").generate(_PROMPT, 16)
    assert len(set(expected)) >= 6
    assert sequence.tokens[len(_PROMPT) :] == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gptq-4-act-order", "awq", "w4a16-zeros", "w8a16"])
def test_triton_multiplies_with_the_integers(
    name: str, device: str, written: dict[str, Path]
) -> None:
    folder = written[name]
    model = load_model(str(folder), None, "auto", torch.device(device), None)
    layers = list(model.quantized)
    pack_quantized(model.network, model.quantized, Implementation.TRITON)
    assert all(layer.weight.stride() == (0, 0) for layer in layers)
    expected = AutoModelForCausalLM.from_pretrained(folder / "expected")
    tokens = torch.tensor([_PROMPT])
    model.network.set_attn_implementation("sdpa")
    with torch.inference_mode():
        found = model.network(tokens.to(device)).logits.cpu()
        wanted = expected(tokens).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_inputs_are_rounded_where_a_setting_allows_it(write: Write) -> None:
    folder = write("awq")
    plain, rounded = load(folder), load(folder, int8_activations=True)
    assert {source().int8_activations for source in plain.quantized.values()} == {False}
    assert {source().int8_activations for source in rounded.quantized.values()} == {True}
    assert plain.fingerprint != rounded.fingerprint
    with pytest.raises(WrongSettingError, match=r"--int8-activations: .* no quantised weights"):
        load(folder / "expected", int8_activations=True)


def test_the_model_computes_in_the_type_that_is_set(write: Write) -> None:
    folder = write("gptq-4")
    model = load(folder, "bfloat16")
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.bfloat16}
    pack_quantized(model.network, model.quantized, Implementation.TORCH)
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.bfloat16}


def test_integers_before_they_are_read_take_no_memory(write: Write) -> None:
    model = load(write("awq"))
    weights = [layer.weight for layer in model.quantized]
    assert len(weights) == 14
    assert all(weight.stride() == (0, 0) and weight.isnan().all() for weight in weights)


@pytest.mark.parametrize("tied", [False, True])
def test_integers_before_they_are_read_take_no_memory_on_a_gpu(tied: bool, tmp_path: Path) -> None:
    model = load(write_checkpoint(FORMATS["awq"], tmp_path, tied=tied))
    shapes = {layer: layer.weight.shape for layer in model.quantized}
    move_stand_ins(model.quantized, torch.device("meta"))
    model.network.to("meta")
    for layer, shape in shapes.items():
        assert (layer.weight.shape, layer.weight.stride()) == (shape, (0, 0))
        assert layer.weight.is_meta


def test_unpacking_by_hand() -> None:
    words = torch.tensor([[0x76543210, -1], [0x01234567, 0x0F]], dtype=torch.int32)
    low_first = [[*range(8), *[15] * 8], [*reversed(range(8)), 15, *[0] * 7]]
    assert unpack(words, 4).tolist() == low_first
    eight = unpack(torch.tensor([[0x04030201, -2]], dtype=torch.int32), 8)
    assert eight.tolist() == [[1, 2, 3, 4, 254, 255, 255, 255]]
    torch.manual_seed(0)
    values = torch.randint(16, (3, 24))
    assert unpack(packed(values, 4), 4).equal(values.byte())


def test_a_zero_of_0_borrows_from_its_neighbour(write: Write) -> None:
    """Version 1 subtracts 1 from a whole word of zeros."""
    folder = write("gptq-4")
    layer, zeros = "model.layers.0.mlp.down_proj", torch.tensor([0, 3, 0, 0, 15, 8, 7, 0])

    def change(state: dict[str, Tensor]) -> None:
        stored = state[f"{layer}.qzeros"]
        words = packed(zeros.unsqueeze(0), 4).long() - 0x11111111
        state[f"{layer}.qzeros"] = words.to(torch.int32).expand_as(stored).contiguous()

    rewrite(folder, change)
    model = load(folder)
    weight = model.quantized[model.network.get_submodule(layer)]()
    found = (weight.offsets / weight.scales).round()[:8, 0]
    assert found.tolist() == zeros.tolist()


def test_orders_of_groups() -> None:
    groups = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    permutation = permutation_of("layer", groups, 2)
    assert permutation is not None
    assert permutation.tolist() == [1, 3, 0, 2]
    assert permutation_of("layer", torch.tensor([0, 0, 1, 1]), 2) is None
    assert permutation_of("layer", torch.zeros(4), 2) is None
    for wrong in ([0, 0, 0, 1], [0, 0, -1, 1], [0, 0, 2, 2]):
        with pytest.raises(ModelError, match="layer: act-order"):
            permutation_of("layer", torch.tensor(wrong), 2)


def test_a_group_beyond_all_is_refused_without_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of all groups below it would take gigabytes."""
    counted = Mock()
    monkeypatch.setattr(Tensor, "bincount", counted)
    monkeypatch.setattr(torch, "bincount", counted)
    with pytest.raises(ModelError, match="layer: act-order with groups of other sizes than 2"):
        permutation_of("layer", torch.tensor([0, 0, 1, 2**31 - 1]), 2)
    counted.assert_not_called()


# Refusals.


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


_LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gptq-4", "qzeros", f"no tensor {_LAYER}.qzeros"),
        ("gptq-4", "scales", f"no tensor {_LAYER}.scales"),
        ("awq", "qzeros", f"no tensor {_LAYER}.qzeros"),
        ("w8a16", "weight_scale", f"no tensor {_LAYER}.weight_scale"),
        ("w8a16", "weight_shape", f"no tensor {_LAYER}.weight_shape"),
        ("w8a8", "weight", f"no tensor {_LAYER}.weight"),
        ("awq", "qweight", f"no {_LAYER}.weight"),
    ],
)
def test_missing_tensors(name: str, tensor: str, message: str, write: Write) -> None:
    folder = write(name)
    rewrite(folder, lambda state: state.pop(f"{_LAYER}.{tensor}"))
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gptq-4", "qweight", r"qweight: I32 \[16, 255\], not I32 \[16, 256\]"),
        ("gptq-4", "scales", "bits"),
        ("gptq-4", "g_idx", r"g_idx: I32 \[127\]"),
        ("awq", "qweight", r"qweight: I32 \[128, 31\]"),
        ("awq", "scales", r"scales: shape \[4, 255\]"),
        ("w8a8", "weight_scale", r"weight_scale: BF16 \[255, 1\]"),
        ("w8a16", "weight_packed", r"weight_packed: I32 \[256, 31\]"),
        ("w4a16-zeros", "weight_zero_point", "weight_zero_point"),
        ("w4a16-zeros", "weight_scale", "3 groups of 128 inputs"),
    ],
)
def test_tensors_of_other_shapes(name: str, tensor: str, message: str, write: Write) -> None:
    folder = write(name)

    def cut(state: dict[str, Tensor]) -> None:
        whole = state[f"{_LAYER}.{tensor}"]
        along = 0 if whole.dim() == 1 or whole.shape[1] == 1 else -1
        state[f"{_LAYER}.{tensor}"] = whole.narrow(along, 0, whole.shape[along] - 1).contiguous()

    rewrite(folder, cut)
    with pytest.raises(ModelError, match=message):
        load(folder)


def _groups(**changes: Any) -> Mapping[str, Any]:
    group = compressed(8).config["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, **changes}}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq-4", {"checkpoint_format": "marlin"}, "GPTQ in the format marlin; served are gptq"),
        ("gptq-4", {"is_marlin_format": True}, "GPTQ in the format marlin"),
        ("awq", {"version": "gemv"}, "AWQ in the version gemv; served is gemm"),
        ("awq", {"bits": 3}, "AWQ of 3 bits"),
        ("awq", {"quant_method": "fp8"}, "quantised by fp8 are not served; served are compressed"),
        ("awq", {"quant_method": None}, "quantised by None"),
        ("w8a16", {"format": "float-quantized"}, "format float-quantized; served are pack"),
        ("w8a16", {"config_groups": {}}, "without config_groups"),
        ("w8a16", _groups(weights={"num_bits": 3}), "int weights of 3 bits"),
        ("w8a16", _groups(weights={"num_bits": 8, "type": "float"}), "float weights of 8 bits"),
        ("w8a16", _groups(input_activations={"num_bits": 4}), "int activations of 4 bits"),
        ("w8a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ("w8a16", {"transform_config": {"config_groups": {"a": {}}}}, "transforms"),
    ],
)
def test_unknown_formats(name: str, changes: Mapping[str, Any], message: str, write: Write) -> None:
    folder = write(name)
    rewrite_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq-4", {"group_size": "32"}, "group_size is '32', not an integer"),
        ("gptq-4", {"dynamic": ["x"]}, r"dynamic is \['x'\], not an object"),
        ("gptq-4", {"dynamic": {".*": 5}}, r"\.\* is 5, not an object"),
        ("awq", {"group_size": []}, r"group_size is \[\], not an integer"),
        ("w8a16", {"sparsity_config": "dense"}, "sparsity_config is 'dense', not an object"),
        ("w8a16", {"transform_config": 1}, "transform_config is 1, not an object"),
        ("w8a16", {"ignore": "lm_head"}, "ignore is 'lm_head', not a list of strings"),
        ("w8a16", {"ignore": [None]}, r"ignore is \[None\], not a list of strings"),
        ("w8a16", {"config_groups": "W8A16"}, "config_groups is 'W8A16', not an object"),
        ("w8a16", _groups(targets=True), "targets is True, not a list of strings"),
        ("w8a16", _groups(weights=8), "weights is 8, not an object"),
        ("w8a16", _groups(weights={"num_bits": 8, "strategy": 1}), "strategy is 1, not a string"),
        ("w8a16", _groups(weights={"num_bits": 8, "group_size": "x"}), "'x', not an integer"),
        ("w8a16", _groups(input_activations="int8"), "input_activations is 'int8', not an obj"),
    ],
)
def test_fields_of_other_kinds(
    name: str, changes: Mapping[str, Any], message: str, write: Write
) -> None:
    folder = write(name)
    rewrite_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize("value", ["gptq", 4, [4]])
def test_a_quantisation_that_is_no_object(value: object, write: Write) -> None:
    folder = write("gptq-4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": value}))
    with pytest.raises(ModelError, match=r"unreadable config\.json"):
        load(folder)
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(value))
    with pytest.raises(ModelError, match=r"quantize_config\.json is .*, not an object"):
        load(folder)


def test_a_method_that_transformers_converts_needs_its_package(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write("awq")
    rewrite_config(folder, quant_method="mxfp4")
    config = AutoConfig.from_pretrained(folder)
    weights = weights_files(folder)
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="mxfp4 need the package accelerate, which is not"):
        formats.quantization_of(config, weights)
    monkeypatch.setattr(formats, "find_spec", lambda name: name)
    assert formats.quantization_of(config, weights) is None


def test_gptq_of_other_bits(write: Write) -> None:
    folder = write("gptq-4")

    def halve(state: dict[str, Tensor]) -> None:
        name = f"{_LAYER}.qzeros"
        state[name] = state[name][:, ::2].contiguous()

    rewrite(folder, halve)
    with pytest.raises(ModelError, match=f"{_LAYER}: GPTQ of 2 bits; served are 4 and 8"):
        load(folder)


def test_a_config_without_quantised_tensors(write: Write) -> None:
    folder = write("gptq-4")
    copyfile(folder / "expected" / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ModelError, match="quant_method gptq, but no tensor is quantised"):
        load(folder)


def test_a_layer_that_the_model_does_not_have(write: Write) -> None:
    folder = write("awq")

    def add(state: dict[str, Tensor]) -> None:
        for tensor in ("qweight", "qzeros", "scales"):
            state[f"model.layers.7.mlp.up_proj.{tensor}"] = state[f"{_LAYER}.{tensor}"].clone()

    rewrite(folder, add)
    with pytest.raises(ModelError, match=r"no linear layer for .* model.layers.7.mlp.up_proj"):
        load(folder)


@pytest.mark.parametrize("name", ["gptq-4", "awq", "w4a16"])
def test_experts_in_one_tensor_are_refused_before_a_network_is_loaded(
    name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(name)
    layer = "model.layers.0.block_sparse_moe.experts.0.w1"

    def add(state: dict[str, Tensor]) -> None:
        for tensor in [tensor for tensor in state if tensor.startswith(f"{_LAYER}.")]:
            state[tensor.replace(_LAYER, layer)] = state[tensor].clone()

    rewrite(folder, add)
    config = json.loads((folder / "config.json").read_text())
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**config, **mixture}))
    monkeypatch.setattr(loading, "load_network", lambda *_, **options: pytest.fail("is loaded"))
    words = rf"MixtralForCausalLM has no linear layer for the quantised weight of {layer}"
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_a_truncated_file(write: Write) -> None:
    folder = write("awq")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)


def test_quantised_weights_are_not_rounded_again(write: Write) -> None:
    folder = write("awq")
    with pytest.raises(WrongSettingError, match="int8, but the checkpoint is quantised by awq"):
        load(folder, quantization="int8")

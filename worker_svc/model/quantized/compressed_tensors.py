"""Weights of compressed-tensors, as llm-compressor stores them: W8A8, W8A16, W4A16.

In the formats `int-quantized` and `naive-quantized` a layer has `weight` int8 and `weight_scale`.
In `pack-quantized` it has `weight_packed` int32, packed along the inputs, `weight_scale` and
`weight_shape`, and `weight_zero_point` if it is asymmetric: int32, packed along the outputs, or one
int8 for all of a weight with one scale. Packed integers are stored plus half of their range. Old
checkpoints with act-order have `weight_g_idx`, the group of each input.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.quantized import QuantizedWeight
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors, StoredWeight
from worker_svc.model.quantized.config_fields import object_of
from worker_svc.model.quantized.config_groups import ConfigGroup, read_config_groups
from worker_svc.model.quantized.integers import FLOATS, group_size_of, permutation_of, unpack
from worker_svc.model.quantized.layer_classes import LayerClasses


def find_weights(
    config: Mapping[str, Any], tensors: CheckpointTensors, classes: LayerClasses
) -> Mapping[str, StoredWeight]:
    """By layer. ModelError for schemes that are not served, and for tensors of other ones."""
    if object_of(config, "sparsity_config").get("format", "dense") != "dense":
        raise ModelError("compressed-tensors with sparse weights is not served")
    if object_of(config, "transform_config").get("config_groups"):
        raise ModelError("compressed-tensors with transforms is not served")
    groups = read_config_groups(config)
    chosen = {
        layer: groups.group_of(layer, classes.classes_of(layer))
        for suffix in ("weight_packed", "weight_scale")
        for layer in tensors.layers(suffix)
    }
    packed = {
        layer: _find_packed(tensors, layer, _required(layer, chosen[layer]))
        for layer in tensors.layers("weight_packed")
    }
    plain = {
        layer: _find_plain(tensors, layer, _required(layer, group))
        for layer, group in chosen.items()
        # As in the library, a weight that the config leaves out may have unused scales.
        if layer not in packed and (group or tensors.dtype(f"{layer}.weight") not in FLOATS)
    }
    return packed | plain


def _required(layer: str, group: ConfigGroup | None) -> ConfigGroup:
    if group is None:
        raise ModelError(
            f"{layer}: a quantised weight, but the config has the layer in `ignore`, or no target "
            "in `config_groups` for it; correct the config"
        )
    return group


def _find_packed(tensors: CheckpointTensors, layer: str, group: ConfigGroup) -> StoredWeight:
    packed, shape_name = f"{layer}.weight_packed", f"{layer}.weight_shape"
    tensors.require(shape_name, ("I64", "I32"), (2,))
    num_outputs, num_inputs = (int(size) for size in tensors.read(shape_name))
    columns = math.ceil(num_inputs * group.bits / 32)
    tensors.require(packed, ("I32",), (num_outputs, columns))
    names = [packed, shape_name, *_scale_names(tensors, layer, group, num_outputs, num_inputs)]
    if (zeros := _zeros_name(tensors, layer, group)) is not None:
        shape = tensors.shape(f"{layer}.weight_scale")
        if group.strategy == "tensor":
            tensors.require(zeros, ("I8",), shape)
        else:
            rows = math.ceil(num_outputs * group.bits / 32)
            tensors.require(zeros, ("I32",), (rows, shape[1]))
    read = partial(_read_packed, tensors, layer, group, (num_outputs, num_inputs))
    return StoredWeight((num_outputs, num_inputs), tuple(names), tensors.num_bytes(names), read)


def _find_plain(tensors: CheckpointTensors, layer: str, group: ConfigGroup) -> StoredWeight:
    weight = f"{layer}.weight"
    shape = tensors.shape(weight)
    if tensors.dtype(weight) != "I8" or len(shape) != 2:
        raise ModelError(f"{weight}: {tensors.dtype(weight)} {list(shape)}, not an I8 matrix")
    names = [weight, *_scale_names(tensors, layer, group, shape[0], shape[1])]
    if (zeros := _zeros_name(tensors, layer, group)) is not None:
        tensors.require(zeros, ("I8",), tensors.shape(f"{layer}.weight_scale"))
    read = partial(_read_plain, tensors, layer, group)
    return StoredWeight((shape[0], shape[1]), tuple(names), tensors.num_bytes(names), read)


def _zeros_name(tensors: CheckpointTensors, layer: str, group: ConfigGroup) -> str | None:
    """The name of a weight's zero points, if it has any. ModelError if it must have them."""
    name = f"{layer}.weight_zero_point"
    if name in tensors.names:
        return name
    if not group.is_symmetric:
        raise ModelError(
            f"{name} is missing, but by the config the weight is not symmetric; correct the "
            "config, or quantise the model again"
        )
    return None


def _scale_names(
    tensors: CheckpointTensors, layer: str, group: ConfigGroup, num_outputs: int, num_inputs: int
) -> list[str]:
    """The names of the scales, and of what else belongs to a weight. ModelError if the scales are
    not those of the group's strategy: one per weight, output, or group of inputs."""
    scale = f"{layer}.weight_scale"
    shape = tensors.shape(scale)
    if group.strategy == "tensor":
        if math.prod(shape) != 1:
            raise ModelError(
                f"{scale}: shape {list(shape)}, but the strategy tensor of the config has 1 scale; "
                "correct the config, or quantise the model again"
            )
        tensors.require(scale, FLOATS, shape)
    else:
        num_groups = shape[1] if len(shape) == 2 else 1
        tensors.require(scale, FLOATS, (num_outputs, num_groups))
        group_size_of(scale, num_inputs, num_groups, group.group_size)
    groups = f"{layer}.weight_g_idx"
    if groups in tensors.names:
        tensors.require(groups, ("I32", "I64"), (num_inputs,))
    # Scales of inputs are not used: each row gets a scale of its own.
    others = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
    return [scale, *(name for o in others if (name := f"{layer}.{o}") in tensors.names)]


def _read_packed(
    tensors: CheckpointTensors, layer: str, group: ConfigGroup, shape: tuple[int, int]
) -> QuantizedWeight:
    num_outputs, num_inputs = shape
    values = unpack(tensors.read(f"{layer}.weight_packed"), group.bits)[:, :num_inputs]
    zeros = torch.tensor(2.0 ** (group.bits - 1))
    if f"{layer}.weight_zero_point" in tensors.names:
        stored = tensors.read(f"{layer}.weight_zero_point")
        if group.strategy == "tensor":
            zeros = zeros + stored.float()
        else:
            zeros = unpack(stored.t(), group.bits)[:, :num_outputs].t().float()
    return _weight(tensors, layer, group, values, zeros)


def _read_plain(tensors: CheckpointTensors, layer: str, group: ConfigGroup) -> QuantizedWeight:
    """Integers are stored as 8 bits, whatever their range."""
    values = tensors.read(f"{layer}.weight").view(torch.uint8) ^ 128
    zeros = torch.tensor(128.0)
    if f"{layer}.weight_zero_point" in tensors.names:
        zeros = zeros + tensors.read(f"{layer}.weight_zero_point").float()
    return _weight(tensors, layer, replace(group, bits=8), values, zeros)


def _weight(
    tensors: CheckpointTensors, layer: str, group: ConfigGroup, values: Tensor, zeros: Tensor
) -> QuantizedWeight:
    num_outputs, num_inputs = values.shape
    scales = tensors.read(f"{layer}.weight_scale").float()
    scales = scales.expand(num_outputs, 1) if scales.numel() == 1 else scales.view(num_outputs, -1)
    scales = scales.contiguous()
    group_size = num_inputs // scales.shape[1]
    permutation = None
    if f"{layer}.weight_g_idx" in tensors.names:
        groups = tensors.read(f"{layer}.weight_g_idx")
        permutation = permutation_of(layer, groups, group_size)
    return QuantizedWeight(
        values.contiguous() if permutation is None else values[:, permutation],
        group.bits,
        scales,
        scales * zeros.view(-1, scales.shape[1]) if zeros.numel() > 1 else scales * zeros,
        group_size,
        permutation,
        group.int8_activations,
    )

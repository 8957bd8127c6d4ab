"""Weights of compressed-tensors, as llm-compressor stores them: W8A8, W8A16, W4A16.

In the formats `int-quantized` and `naive-quantized` a layer has `weight` int8 and `weight_scale`.
In `pack-quantized` it has `weight_packed` int32, packed along the inputs, `weight_scale` and
`weight_shape`, and `weight_zero_point`, packed along the outputs, if it is asymmetric. Packed
integers are stored plus half of their range. Old checkpoints with act-order have `weight_g_idx`,
the group of each input.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from kernels.quantized import Bits, QuantizedWeight
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors, StoredWeight
from worker_svc.model.quantized.integers import FLOATS, group_size_of, permutation_of, unpack

_PACKED: Final = "pack-quantized"
_FORMATS: Final = (_PACKED, "int-quantized", "naive-quantized")


@dataclass(frozen=True)
class _Group:
    """The layers of one scheme."""

    targets: tuple[str, ...]  # names, `re:` and a pattern of names, or classes of layers
    bits: Bits
    int8_activations: bool

    def names(self, layer: str) -> bool:
        """Whether a target is this layer, other than by its class."""
        return any(
            re.match(target[3:], layer) if target.startswith("re:") else target == layer
            for target in self.targets
        )


def find_weights(
    config: Mapping[str, Any], tensors: CheckpointTensors
) -> Mapping[str, StoredWeight]:
    """By layer. ModelError for schemes that are not served."""
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ModelError("compressed-tensors with sparse weights is not served")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise ModelError("compressed-tensors with transforms is not served")
    groups = [
        _group(group, str(config.get("format", "")))
        for group in (config.get("config_groups") or {}).values()
    ]
    if not groups:
        raise ModelError("compressed-tensors without config_groups")
    packed = {
        layer: _find_packed(tensors, layer, _group_of(groups, layer))
        for layer in tensors.layers("weight_packed")
    }
    plain = {
        layer: _find_plain(tensors, layer, _group_of(groups, layer))
        for layer in tensors.layers("weight_scale")
        if layer not in packed
    }
    return packed | plain


def _group(group: Mapping[str, Any], format_name: str) -> _Group:
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    format_name = group.get("format") or format_name
    if format_name not in _FORMATS:
        raise ModelError(
            f"compressed-tensors in the format {format_name}; served are {', '.join(_FORMATS)}"
        )
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    if kind != "int" or bits not in (4, 8):
        raise ModelError(f"compressed-tensors: {kind} weights of {bits} bits; served are int 4, 8")
    if activations is not None:
        kind, num_bits = activations.get("type", "int"), activations.get("num_bits")
        if (kind, num_bits) != ("int", 8):
            raise ModelError(f"compressed-tensors: {kind} activations of {num_bits} bits")
    return _Group(tuple(group.get("targets") or ()), bits, activations is not None)


def _group_of(groups: list[_Group], layer: str) -> _Group:
    """The one that names the layer, else the first of a class."""
    named = [group for group in groups if group.names(layer)]
    by_class = [group for group in groups if {"Linear", "Embedding"} & {*group.targets}]
    return (named or by_class or groups)[0]


def _find_packed(tensors: CheckpointTensors, layer: str, group: _Group) -> StoredWeight:
    packed, shape_name = f"{layer}.weight_packed", f"{layer}.weight_shape"
    tensors.require(shape_name, ("I64", "I32"), (2,))
    num_outputs, num_inputs = (int(size) for size in tensors.read(shape_name))
    columns = math.ceil(num_inputs * group.bits / 32)
    tensors.require(packed, ("I32",), (num_outputs, columns))
    names = [packed, shape_name, *_scale_names(tensors, layer, num_outputs, num_inputs)]
    zeros = f"{layer}.weight_zero_point"
    if zeros in tensors.names:
        num_groups = tensors.shape(f"{layer}.weight_scale")[1]
        tensors.require(zeros, ("I32",), (math.ceil(num_outputs * group.bits / 32), num_groups))
    read = partial(_read_packed, tensors, layer, group, (num_outputs, num_inputs))
    return StoredWeight((num_outputs, num_inputs), tuple(names), tensors.num_bytes(names), read)


def _find_plain(tensors: CheckpointTensors, layer: str, group: _Group) -> StoredWeight:
    weight = f"{layer}.weight"
    shape = tensors.shape(weight)
    if tensors.dtype(weight) != "I8" or len(shape) != 2:
        raise ModelError(f"{weight}: {tensors.dtype(weight)} {list(shape)}, not an I8 matrix")
    names = [weight, *_scale_names(tensors, layer, *shape)]
    zeros = f"{layer}.weight_zero_point"
    if zeros in tensors.names:
        tensors.require(zeros, ("I8",), tensors.shape(f"{layer}.weight_scale"))
    read = partial(_read_plain, tensors, layer, group)
    return StoredWeight((shape[0], shape[1]), tuple(names), tensors.num_bytes(names), read)


def _scale_names(
    tensors: CheckpointTensors, layer: str, num_outputs: int, num_inputs: int
) -> list[str]:
    """The names of the scales, and of what else belongs to a weight. ModelError if the scales are
    not one per weight, output, or group of inputs."""
    scale = f"{layer}.weight_scale"
    shape = tensors.shape(scale)
    if math.prod(shape) == 1:
        tensors.require(scale, FLOATS, shape)
    else:
        num_groups = shape[1] if len(shape) == 2 else 1
        tensors.require(scale, FLOATS, (num_outputs, num_groups))
        group_size_of(layer, num_inputs, num_groups)
    groups = f"{layer}.weight_g_idx"
    if groups in tensors.names:
        tensors.require(groups, ("I32", "I64"), (num_inputs,))
    # Scales of inputs are not used: each row gets a scale of its own.
    others = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point")
    return [scale, *(name for o in others if (name := f"{layer}.{o}") in tensors.names)]


def _read_packed(
    tensors: CheckpointTensors, layer: str, group: _Group, shape: tuple[int, int]
) -> QuantizedWeight:
    num_outputs, num_inputs = shape
    values = unpack(tensors.read(f"{layer}.weight_packed"), group.bits)[:, :num_inputs]
    zeros = torch.tensor(2.0 ** (group.bits - 1))
    if f"{layer}.weight_zero_point" in tensors.names:
        packed = tensors.read(f"{layer}.weight_zero_point")
        zeros = unpack(packed.t(), group.bits)[:, :num_outputs].t().float()
    return _weight(tensors, layer, group, values, zeros)


def _read_plain(tensors: CheckpointTensors, layer: str, group: _Group) -> QuantizedWeight:
    """Integers are stored as 8 bits, whatever their range."""
    values = tensors.read(f"{layer}.weight").view(torch.uint8) ^ 128
    zeros = torch.tensor(128.0)
    if f"{layer}.weight_zero_point" in tensors.names:
        zeros = zeros + tensors.read(f"{layer}.weight_zero_point").float()
    return _weight(tensors, layer, replace(group, bits=8), values, zeros)


def _weight(
    tensors: CheckpointTensors, layer: str, group: _Group, values: Tensor, zeros: Tensor
) -> QuantizedWeight:
    num_outputs, num_inputs = values.shape
    scales = tensors.read(f"{layer}.weight_scale").float()
    scales = scales.expand(num_outputs, 1) if scales.numel() == 1 else scales.view(num_outputs, -1)
    scales = scales.contiguous()
    group_size = group_size_of(layer, num_inputs, scales.shape[1])
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

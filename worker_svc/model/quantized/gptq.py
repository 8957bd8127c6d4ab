"""Weights of GPTQ, as AutoGPTQ and GPTQModel store them.

A layer has `qweight` int32 `[num_inputs * bits / 32, num_outputs]`, packed along the inputs,
`scales [num_groups, num_outputs]`, `qzeros` int32 `[num_groups, num_outputs * bits / 32]`, packed
along the outputs, and with act-order `g_idx [num_inputs]`, the group of each input. A weight is
`scale * (value - zero)`. The first version of the format stores `zero - 1`.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from kernels.quantized import Bits, QuantizedWeight
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors, StoredWeight
from worker_svc.model.quantized.config_fields import as_object, integer_of, object_of
from worker_svc.model.quantized.integers import FLOATS, group_size_of, permutation_of, unpack

_FORMATS: Final = ("gptq", "gptq_v2")
# A 1 in each integer of 32 bits.
_ONES: Final = {4: 0x11111111, 8: 0x01010101}


def find_weights(
    config: Mapping[str, Any], tensors: CheckpointTensors
) -> Mapping[str, StoredWeight]:
    """By layer. ModelError for formats and sizes that are not served."""
    name = config.get("checkpoint_format") or config.get("format") or "gptq"
    if name not in _FORMATS or config.get("is_marlin_format"):
        shown = "marlin" if config.get("is_marlin_format") else name
        raise ModelError(f"GPTQ in the format {shown}; served are {' and '.join(_FORMATS)}")
    return {
        layer: _find(tensors, layer, name == "gptq", _configured_group_size(config, layer))
        for layer in tensors.layers("qweight")
    }


def _configured_group_size(config: Mapping[str, Any], layer: str) -> int | None:
    """The config's group size; -1 is all inputs. In `dynamic` GPTQModel has other values for layers
    by patterns of their names, of which the first that matches counts."""
    common = integer_of(config, "group_size")
    for pattern, changes in object_of(config, "dynamic").items():
        try:
            matches = re.match(pattern.removeprefix("+:").removeprefix("-:"), layer)
        except re.error as error:
            raise ModelError(f"GPTQ: the pattern {pattern} in dynamic: {error}") from error
        if matches:
            found = as_object(pattern, changes or {})
            return integer_of(found, "group_size") if "group_size" in found else common
    return common


def _find(
    tensors: CheckpointTensors, layer: str, minus_one: bool, configured: int | None
) -> StoredWeight:
    """Bits follow from the shapes, since GPTQModel has different ones in one model. `configured` is
    the config's group size."""
    weight, zeros, scales, groups = (
        f"{layer}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")
    )
    num_groups, num_outputs = _matrix(tensors, scales)
    bits = _bits(layer, 32 * _matrix(tensors, zeros)[1] / num_outputs)
    rows = _matrix(tensors, weight)[0]
    num_inputs = rows * 32 // bits
    tensors.require(weight, ("I32",), (rows, num_outputs))
    tensors.require(zeros, ("I32",), (num_groups, num_outputs * bits // 32))
    tensors.require(scales, FLOATS, (num_groups, num_outputs))
    names = [weight, zeros, scales]
    if groups in tensors.names:
        tensors.require(groups, ("I32", "I64"), (num_inputs,))
        names.append(groups)
    group_size = group_size_of(scales, num_inputs, num_groups, configured)
    read = partial(_read, tensors, layer, bits, minus_one, group_size)
    return StoredWeight((num_outputs, num_inputs), tuple(names), tensors.num_bytes(names), read)


def _bits(layer: str, bits: float) -> Bits:
    if bits == 4:
        return 4
    if bits == 8:
        return 8
    raise ModelError(f"{layer}: GPTQ of {bits:g} bits; served are 4 and 8")


def _matrix(tensors: CheckpointTensors, name: str) -> tuple[int, int]:
    shape = tensors.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise ModelError(f"{name}: shape {list(shape)}, not a matrix")
    return shape[0], shape[1]


def _read(
    tensors: CheckpointTensors, layer: str, bits: Bits, minus_one: bool, group_size: int
) -> QuantizedWeight:
    values = unpack(tensors.read(f"{layer}.qweight").t(), bits)
    stored = tensors.read(f"{layer}.qzeros")
    zeros = unpack(_plus_one(stored, bits) if minus_one else stored, bits)
    scales = tensors.read(f"{layer}.scales").float()
    permutation = None
    if f"{layer}.g_idx" in tensors.names:
        permutation = permutation_of(layer, tensors.read(f"{layer}.g_idx"), group_size)
    return QuantizedWeight(
        values if permutation is None else values[:, permutation],
        bits,
        scales.t().contiguous(),
        (scales * zeros).t().contiguous(),
        group_size,
        permutation,
    )


def _plus_one(packed: Tensor, bits: Bits) -> Tensor:
    """The packed integers plus 1. They are added as one number, since GPTQModel subtracts so: a
    zero of 0 borrows from its neighbour."""
    return (packed.long() + _ONES[bits]).to(torch.int32)

"""Weights of AWQ, as AutoAWQ stores them for its matrix products (version `gemm`).

A layer has `qweight` int32 `[num_inputs, num_outputs / 8]`, `qzeros` int32 `[num_groups,
num_outputs / 8]` and `scales [num_groups, num_outputs]`. The eight outputs of an integer are in the
order of `_ORDER`. A weight is `scale * (value - zero)`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor

from kernels.quantized import QuantizedWeight
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.quantized.checkpoint_tensors import CheckpointTensors, StoredWeight
from worker_svc.model.quantized.config_fields import integer_of
from worker_svc.model.quantized.integers import FLOATS, group_size_of, unpack

# Of the outputs of an integer, from its lowest bits to its highest.
_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES: Final = [_ORDER.index(output) for output in range(8)]


def find_weights(
    config: Mapping[str, Any], tensors: CheckpointTensors
) -> Mapping[str, StoredWeight]:
    """By layer. ModelError for versions and sizes that are not served."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"AWQ in the version {version}; served is gemm")
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise ModelError(f"AWQ of {bits} bits; served are 4")
    group_size = integer_of(config, "group_size")
    if group_size is None:
        group_size = integer_of(config, "q_group_size")
    return {layer: _find(tensors, layer, group_size) for layer in tensors.layers("qweight")}


def _find(tensors: CheckpointTensors, layer: str, configured: int | None) -> StoredWeight:
    """`configured` is the config's group size; -1 is all inputs."""
    weight, zeros, scales = (f"{layer}.{name}" for name in ("qweight", "qzeros", "scales"))
    shape = tensors.shape(scales)
    if len(shape) != 2 or shape[1] % 8:
        raise ModelError(f"{scales}: shape {list(shape)}, not groups and outputs")
    num_groups, num_outputs = shape
    num_inputs = tensors.shape(weight)[0]
    tensors.require(weight, ("I32",), (num_inputs, num_outputs // 8))
    tensors.require(zeros, ("I32",), (num_groups, num_outputs // 8))
    tensors.require(scales, FLOATS, (num_groups, num_outputs))
    group_size = group_size_of(scales, num_inputs, num_groups, configured)
    read = partial(_read, tensors, layer, group_size)
    names = (weight, zeros, scales)
    return StoredWeight((num_outputs, num_inputs), names, tensors.num_bytes(names), read)


def _read(tensors: CheckpointTensors, layer: str, group_size: int) -> QuantizedWeight:
    scales = tensors.read(f"{layer}.scales").float()
    zeros = _outputs(tensors.read(f"{layer}.qzeros"))
    return QuantizedWeight(
        _outputs(tensors.read(f"{layer}.qweight")).t().contiguous(),
        4,
        scales.t().contiguous(),
        (scales * zeros).t().contiguous(),
        group_size,
    )


def _outputs(packed: Tensor) -> Tensor:
    """Integers of all outputs, in order."""
    eights = unpack(packed, 4).view(len(packed), -1, 8)
    return eights[:, :, _PLACES].flatten(1)

"""Converts packed weights to JSON and tensors, and back."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor

from kernels.decoder import EmbeddingAndHead, LayerWeights
from kernels.dispatch import Implementation
from kernels.fused import Activation
from kernels.linear import PackedLinear, PackedWeight
from worker_svc.cache.kv_pool import AttentionSpec
from worker_svc.packed.packed_model import PackedNetwork

_CLASSES: Final[Mapping[str, Callable[..., Any]]] = {
    one.__name__: one
    for one in (
        PackedNetwork,
        AttentionSpec,
        LayerWeights,
        PackedLinear,
        PackedWeight,
        EmbeddingAndHead,
        Implementation,
        Activation,
    )
}


def encode(value: object, tensors: dict[str, Tensor], name: str = "") -> Any:
    """JSON in which tensors have names; they are added to `tensors`. TypeError for a class that
    is not among those that `decode` knows."""
    match value:
        case Tensor():
            tensors[name] = value
            return {"tensor": name}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case Enum():
            return {"class": _class_name(value), "arguments": [value.value]}
        case tuple() | list():
            return [encode(item, tensors, f"{name}.{at}") for at, item in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
    if not is_dataclass(value):
        raise TypeError(f"{name}: a {type(value).__name__}")
    named = {field.name: getattr(value, field.name) for field in fields(value)}
    encoded = {key: encode(item, tensors, f"{name}.{key}") for key, item in named.items()}
    return {"class": _class_name(value), "named": encoded}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was encoded, with tuples for lists. LookupError, TypeError or ValueError for anything
    else."""
    if isinstance(value, list):
        return tuple(decode(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    named = {key: decode(item, tensors) for key, item in value.get("named", {}).items()}
    return _CLASSES[value["class"]](*value.get("arguments", ()), **named)


def _class_name(value: object) -> str:
    name = type(value).__name__
    if name not in _CLASSES:
        raise TypeError(f"a {name}")
    return name

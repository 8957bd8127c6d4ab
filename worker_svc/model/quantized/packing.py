"""Gives layers their quantised weights."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernels.dispatch import Implementation
from kernels.linear import PackedLinear, PackedWeight
from kernels.quantized import QuantizedWeight
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.quantized.sources import WeightSources
from worker_svc.model.weight_packing import (
    free_weight,
    is_plain_embedding,
    modules_by_weight,
    packed_linear,
    set_forward,
)
from worker_svc.model.weight_progress import WeightProgress


def pack_quantized(
    network: Any,
    sources: WeightSources,
    implementation: Implementation,
    progress: LoadProgress | None = None,
    files: Iterable[Path] = (),
) -> Counter[str]:
    """Replace the weights of the layers that have a source; return counts. A tied embedding reads
    its rows from the packed weight.

    Without C++ kernels, layers get the weights that the integers stand for, in the model's dtype.
    ModelError if a weight has another shape than its layer. `files` are those of the weights; their
    pages are released as the weights are packed.
    """
    packed: Counter[str] = Counter()
    groups = [users for users in modules_by_weight(network) if any(u in sources for u in users)]
    counted = WeightProgress("packing quantised weights", network, groups, progress, files)
    for users in groups:
        counted.begin(users)
        weight = next(sources[user] for user in users if user in sources)()
        expected = users[0].get_parameter("weight").shape
        if weight.values.shape != expected:
            found = list(weight.values.shape)
            raise ModelError(f"a quantised weight of shape {found} for one of {list(expected)}")
        linears = [user for user in users if type(user) is nn.Linear]
        packed[f"{weight.bits}-bit weights"] += 1
        if implementation.is_cpp:
            _pack(users, linears, weight, implementation)
        else:
            _set_weight(users, weight)
    return packed


def restore_weights(layers: Iterable[nn.Module]) -> int:
    """Give packed layers the weights that their integers stand for, in the model's dtype; return
    their number. This is for models whose code reads a weight past its layer."""
    count = 0
    for layer in layers:
        product = layer.forward
        if isinstance(layer, nn.Linear) and isinstance(product, PackedLinear):
            rows = product.weight.rows(torch.arange(product.weight.num_outputs))
            layer.weight = nn.Parameter(rows.to(layer.weight.dtype), requires_grad=False)
            del layer.forward
            count += 1
    return count


def _pack(
    users: list[nn.Module],
    linears: list[nn.Linear],
    weight: QuantizedWeight,
    implementation: Implementation,
) -> None:
    dtype = users[0].get_parameter("weight").dtype
    embeddings = [user for user in users if is_plain_embedding(user)]
    if len(linears) + len(embeddings) < len(users):
        _set_weight(users, weight)
    packed = PackedWeight.of_quantized(weight, implementation, dtype)
    for layer in linears:
        set_forward(layer, packed_linear(layer, packed))
    for embedding in embeddings:
        set_forward(embedding, packed.rows)
    if len(linears) + len(embeddings) == len(users):
        free_weight(users)


def _set_weight(users: list[nn.Module], weight: QuantizedWeight) -> None:
    own = users[0].get_parameter("weight")
    data = weight.dequantize().to(own.device, own.dtype)
    parameter = nn.Parameter(data, requires_grad=False)
    for user in users:
        user.weight = parameter

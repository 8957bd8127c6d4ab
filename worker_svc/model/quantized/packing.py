"""Gives layers their quantised weights."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.dispatch import Implementation
from kernels.inputs.tiled_weight import TiledWeight
from kernels.linear import PackedLinear, PackedWeight
from kernels.quantized import QuantizedWeight
from kernels.tiled_linear import TiledEmbedding, TiledLinear
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.quantized.sources import WeightSources
from worker_svc.model.weight_packing import (
    float32_bias,
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

    Without C++ or Triton kernels, layers get the weights that the integers stand for, in the
    model's dtype. ModelError if a weight has another shape than its layer. `files` are those of the
    weights; their pages are released as the weights are packed.
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
        if multiplies_integers(implementation):
            _pack(users, linears, weight, implementation)
        else:
            _set_weight(users, weight)
    return packed


def multiplies_integers(implementation: Implementation) -> bool:
    """Whether quantised weights keep their bits in memory."""
    return implementation.is_cpp or implementation == Implementation.TRITON


def restore_weights(layers: Iterable[nn.Module]) -> int:
    """Give packed layers the weights that their integers stand for, in the model's dtype; return
    their number. This is for models whose code reads a weight past its layer."""
    count = 0
    for layer in layers:
        product = layer.forward
        if isinstance(layer, nn.Linear) and isinstance(product, PackedLinear | TiledLinear):
            weight = product.weight
            rows = weight.rows(torch.arange(weight.num_outputs, device=layer.weight.device))
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
    embeddings = [user for user in users if is_plain_embedding(user)]
    if len(linears) + len(embeddings) < len(users):
        _set_weight(users, weight)
    own = users[0].get_parameter("weight")
    if implementation.is_cpp:
        forwards = _in_panels(weight, implementation, own.dtype)
    else:
        forwards = _in_tiles(weight.to(own.device), implementation, own.dtype)
    for layer in linears:
        set_forward(layer, forwards.product(layer))
    for embedding in embeddings:
        set_forward(embedding, forwards.look_up)
    if len(linears) + len(embeddings) == len(users):
        free_weight(users)


@dataclass(frozen=True)
class _Forwards:
    """The forward passes that read one packed weight."""

    product: Callable[[nn.Linear], Callable[[Tensor], Tensor]]
    look_up: Callable[[Tensor], Tensor]


def _in_panels(
    weight: QuantizedWeight, implementation: Implementation, dtype: torch.dtype
) -> _Forwards:
    packed = PackedWeight.of_quantized(weight, implementation, dtype)
    return _Forwards(partial(packed_linear, weight=packed), packed.rows)


def _in_tiles(
    weight: QuantizedWeight, implementation: Implementation, dtype: torch.dtype
) -> _Forwards:
    tiled = TiledWeight.of(weight, dtype)

    def product(layer: nn.Linear) -> TiledLinear:
        return TiledLinear(tiled, float32_bias(layer), implementation)

    return _Forwards(product, TiledEmbedding(tiled))


def _set_weight(users: list[nn.Module], weight: QuantizedWeight) -> None:
    own = users[0].get_parameter("weight")
    data = weight.dequantize().to(own.device, own.dtype)
    parameter = nn.Parameter(data, requires_grad=False)
    for user in users:
        user.weight = parameter

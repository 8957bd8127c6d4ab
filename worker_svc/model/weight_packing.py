"""Packs a model's weights into the layout of the kernel that multiplies with them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from kernels.dispatch import Implementation
from kernels.fused import Activation
from kernels.linear import WEIGHT_DTYPES, PackedLinear, PackedWeight, gated_linear
from worker_svc.model.elementwise_fusion import GatedMlp
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.weight_progress import WeightProgress


def pack(
    network: nn.Module,
    implementation: Implementation,
    kept: Container[nn.Module] = (),
    progress: LoadProgress | None = None,
    files: Iterable[Path] = (),
) -> Counter[str]:
    """Replace the products of linear layers but those `kept`; return counts. A weight that nothing
    else reads is freed as soon as it is packed, so at most one weight is in memory twice.

    Tied embeddings read their rows from the packed weight. A freed weight reads as NaN. `files` are
    those of the weights; their pages are released as the weights are packed.
    """
    packed: Counter[str] = Counter()
    if not implementation.is_cpp:
        return packed
    weights = modules_by_weight(network)
    counted = WeightProgress("packing weights", network, weights, progress, files)
    for users in weights:
        counted.begin(users)
        linears = [user for user in users if is_unpacked(user)]
        embeddings = [user for user in users if is_plain_embedding(user)]
        if not linears or linears[0].weight.dtype not in WEIGHT_DTYPES:
            continue
        if any(layer in kept for layer in linears):
            packed["kept products"] += len(linears)
            continue
        weight = PackedWeight.of(linears[0].weight.detach(), implementation)
        for layer in linears:
            set_forward(layer, packed_linear(layer, weight))
        packed["products"] += len(linears)
        if len(linears) + len(embeddings) == len(users):
            for embedding in embeddings:
                set_forward(embedding, weight.rows)
            free_weight(users)
    _copy_mapped(network)
    for module in network.modules():
        if isinstance(module.forward, GatedMlp):
            packed["gated products"] += _join_gate(module, module.forward)
    return packed


def packed_linear(layer: nn.Linear, weight: PackedWeight) -> PackedLinear:
    """The forward pass of a linear layer whose weight was packed."""
    return PackedLinear(weight, float32_bias(layer))


def float32_bias(layer: nn.Linear) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach().float().contiguous()


@dataclass(frozen=True)
class PackedGatedMlp:
    """The forward pass of a gated MLP, with gate and up projection in one call."""

    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    activation: Activation

    def __call__(self, states: Tensor, residual: Tensor | None = None) -> Tensor:
        active = gated_linear(
            states,
            self.gate.weight,
            self.up.weight,
            self.activation,
            self.gate.bias,
            self.up.bias,
        )
        return self.down(active, residual)


def _join_gate(module: nn.Module, mlp: GatedMlp) -> bool:
    """Replace a gated MLP whose projections were packed, if one call may multiply gate and up."""
    products = products_of(mlp.gate, mlp.up, mlp.down)
    if products is None or not products[0].weight.is_like(products[1].weight):
        return False
    gate, up, down = products
    set_forward(module, PackedGatedMlp(gate, up, down, mlp.activation))
    return True


def products_of(*layers: nn.Module) -> list[PackedLinear] | None:
    """Their forward passes; None if one of them is not a packed product."""
    products = [layer.forward for layer in layers if isinstance(layer.forward, PackedLinear)]
    return products if len(products) == len(layers) else None


def modules_by_weight(network: nn.Module) -> list[list[nn.Module]]:
    """The modules with weights, grouped by weight."""
    users: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if parameter is not getattr(module, "bias", None):
                users[parameter].append(module)
    return list(users.values())


def is_unpacked(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a plain linear layer that was not packed."""
    return type(module) is nn.Linear and not isinstance(module.forward, PackedLinear)


def is_plain_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None


def set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = forward


def free_weight(modules: list[nn.Module]) -> None:
    """Replace the weight of all of them by NaN of its shape, which takes no memory."""
    weight = modules[0].get_parameter("weight")
    nothing = weight.new_full((1, 1), torch.nan).expand(weight.shape)
    freed = nn.Parameter(nothing, requires_grad=False)
    for module in modules:
        module.weight = freed


def _copy_mapped(network: nn.Module) -> None:
    """Copy weights out of mapped files: a file stays mapped while one of its weights is used."""
    for parameter in network.parameters():
        if parameter.is_contiguous():
            parameter.data = parameter.data.clone()

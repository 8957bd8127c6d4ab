"""A model's weights, laid out for the kernel that multiplies with them."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.choice import Implementation
from kernels.fused import Activation
from kernels.linear import WEIGHT_DTYPES, PackedWeight, Product, gated_linear
from worker_svc.fusing import GatedMlp


def pack(network: nn.Module, implementation: Implementation) -> Counter[str]:
    """Exchanges the products of linear layers and says how many. A weight that nobody else reads
    is freed as soon as it is laid out, so that there are hardly ever two of one.

    Embeddings that share a weight with a linear layer, as tied ones do, look it up in its new
    place. What takes a freed weight without being its layer meets NaN.
    """
    packed: Counter[str] = Counter()
    if not implementation.is_cpp:
        return packed
    for users in _by_weight(network):
        linears = [user for user in users if type(user) is nn.Linear]
        embeddings = [user for user in users if _only_looks_up(user)]
        if not linears or linears[0].weight.dtype not in WEIGHT_DTYPES:
            continue
        weight = PackedWeight.of(linears[0].weight.detach(), implementation)
        for layer in linears:
            bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
            _exchange(layer, Product(weight, bias))
        packed["products"] += len(linears)
        if len(linears) + len(embeddings) == len(users):
            for embedding in embeddings:
                _exchange(embedding, weight.rows)
            _free(users)
    _leave_files(network)
    for module in network.modules():
        if isinstance(module.forward, GatedMlp):
            packed["gated products"] += _join_gate(module, module.forward)
    return packed


@dataclass(frozen=True)
class GatedProducts:
    """The forward pass of three projections, the first two of them in one pass."""

    gate: Product
    up: Product
    down: Product
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
    """Makes one of the products of the gate and of what it is a gate of."""
    products = products_of(mlp.gate, mlp.up, mlp.down)
    if products is None:
        return False
    gate, up, down = products
    _exchange(module, GatedProducts(gate, up, down, mlp.activation))
    return True


def products_of(*layers: nn.Module) -> list[Product] | None:
    """Their forward passes; None if one of them is no product."""
    products = [layer.forward for layer in layers if isinstance(layer.forward, Product)]
    return products if len(products) == len(layers) else None


def _by_weight(network: nn.Module) -> list[list[nn.Module]]:
    """The modules that have a weight, those with the same one together."""
    users: dict[Tensor, list[nn.Module]] = defaultdict(list)
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if parameter is not getattr(module, "bias", None):
                users[parameter].append(module)
    return list(users.values())


def _only_looks_up(module: nn.Module) -> bool:
    return type(module) is nn.Embedding and module.max_norm is None


def _exchange(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _free(modules: list[nn.Module]) -> None:
    """In place of their weight, all of them get one of its shape that takes no memory."""
    weight = modules[0].get_parameter("weight")
    nothing = weight.new_full((1, 1), torch.nan).expand(weight.shape)
    freed = nn.Parameter(nothing, requires_grad=False)
    for module in modules:
        module.weight = freed


def _leave_files(network: nn.Module) -> None:
    """Weights may lie in mapped files, all of which stay in memory for the smallest of them."""
    for parameter in network.parameters():
        if parameter.is_contiguous():
            parameter.data = parameter.data.clone()

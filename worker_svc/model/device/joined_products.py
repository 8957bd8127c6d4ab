"""Several products of the same states as one, so that a GPU launches one kernel.

The weights of the layers become parts of one, so nothing is in memory twice, but for a moment.
Those of quantised layers are copied, and then released.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kernels.dispatch import Implementation
from kernels.fused import Activation, gated_activation
from kernels.tiled_linear import TiledLinear
from worker_svc.model.elementwise_fusion import GatedMlp


@dataclass(frozen=True)
class JoinedLinear:
    """Linear layers with the same inputs. The outputs follow one another."""

    weight: Tensor  # [num_outputs of all, num_inputs]
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


Joined = JoinedLinear | TiledLinear


@dataclass(frozen=True)
class JoinedGatedMlp:
    """The forward pass of a gated MLP, with gate and up projection in one product."""

    gate_and_up: Joined  # as many outputs of each
    down: nn.Module
    activation: Activation
    implementation: Implementation

    def __call__(self, states: Tensor) -> Any:
        gates, values = self.gate_and_up(states).chunk(2, -1)
        active = gated_activation(
            gates, values, self.activation, implementation=self.implementation
        )
        return self.down(active)


@torch.inference_mode()
def join(layers: Sequence[nn.Module]) -> Joined | None:
    """One product for all; None if one of them is neither plain nor quantised, or has another type,
    other inputs, or a bias where others have none. Quantised layers are to be released."""
    tiled = [one.forward for one in layers if isinstance(one.forward, TiledLinear)]
    if len(tiled) == len(layers):
        return TiledLinear.joined(tiled)
    plain = [layer for layer in layers if _is_plain(layer)]
    if len(plain) != len(layers):
        return None
    kinds = {(one.in_features, one.weight.dtype, one.bias is None) for one in plain}
    if len(kinds) != 1:
        return None
    bias = None if plain[0].bias is None else _joined([one.bias for one in plain])
    return JoinedLinear(_joined([one.weight for one in plain]), bias)


def release(layers: Sequence[nn.Module]) -> None:
    """Free the own weights of quantised layers that were joined, which then give NaN."""
    for layer in layers:
        if isinstance(layer.forward, TiledLinear):
            del layer.forward


def join_gate(module: nn.Module) -> bool:
    """Replace a gated MLP if its gate and up projection can be one product."""
    mlp = module.forward
    if not isinstance(mlp, GatedMlp):
        return False
    joined = join([mlp.gate, mlp.up])
    if joined is None:
        return False
    release([mlp.gate, mlp.up])
    module.forward = JoinedGatedMlp(joined, mlp.down, mlp.activation, mlp.implementation)
    return True


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the layer is linear, and its forward pass was not replaced."""
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor, of which the parameters become parts."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    parts = joined.split_with_sizes([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined

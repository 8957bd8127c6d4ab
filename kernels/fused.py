"""Chains of elementwise operations in one pass over memory: what stands between the matrix
products of a transformer's layer.

Each computes in float32 and rounds once, at its end.
"""

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kernels.choice import Implementation, choose


class Activation(IntEnum):
    """As the C++ kernels number them."""

    SILU = 0
    GELU_TANH = 1


def rms_norm(
    states: Tensor, weight: Tensor, epsilon: float, *, implementation: Implementation | None = None
) -> Tensor:
    """`states / sqrt(mean(states ** 2) + epsilon) * weight` over the last dimension.

    `weight` is float32. The result is dense, in the dtype of the states.
    """
    implementation = implementation or choose(states.device.type, (states.dtype,))
    if not implementation.is_cpp:
        return rms_norm_reference(states, weight, epsilon)
    out: Tensor = torch.ops.quire.rms_norm(states, weight, epsilon, implementation.isa)
    return out


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    *,
    implementation: Implementation | None = None,
) -> Tensor:
    """`activation(gate) * up`, dense."""
    implementation = implementation or choose(gate.device.type, (gate.dtype,))
    if not implementation.is_cpp:
        return gated_activation_reference(gate, up, activation)
    out: Tensor = torch.ops.quire.gated_activation(gate, up, activation, implementation.isa)
    return out


def rotate(
    query: Tensor,
    key: Tensor,
    cosines: Tensor,
    sines: Tensor,
    *,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """Query and key `[1, heads, num_tokens, dim]` turned by rotary embedding, as Su et al.,
    "RoFormer" (2021), say it, in the form that pairs number i with number `dim / 2 + i`.

    `cosines` and `sines` are `[1, num_tokens, dim]`, of the same dtype.
    """
    implementation = implementation or choose(query.device.type, (query.dtype,))
    if not implementation.is_cpp:
        return rotate_reference(query, key, cosines, sines)
    turned: tuple[Tensor, Tensor] = torch.ops.quire.rotate(
        query, key, cosines, sines, implementation.isa
    )
    return turned


def turn_heads(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norms: Tensor | None = None,
    epsilon: float = 0.0,
    *,
    implementation: Implementation | None = None,
) -> None:
    """Turns heads `[num_tokens, num_heads, dim]` as `rotate` does, in their place; before that they
    go through `rms_norm`, where there are weights for it, float32 `norms [num_heads, dim]`.

    `cosines` and `sines` are `[1, num_tokens, dim]`, of the same dtype.
    """
    implementation = implementation or choose(heads.device.type, (heads.dtype,))
    if implementation.is_cpp:
        torch.ops.quire.turn_heads(heads, cosines, sines, norms, epsilon, implementation.isa)
    else:
        heads.copy_(turn_heads_reference(heads, cosines, sines, norms, epsilon))


def rms_norm_reference(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The obvious twin of `rms_norm`."""
    wide = states.float()
    factor = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * factor * weight).to(states.dtype)


def gated_activation_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The obvious twin of `gated_activation`."""
    wide = gate.float()
    active = silu(wide) if activation == Activation.SILU else gelu(wide, approximate="tanh")
    return (active * up.float()).to(gate.dtype)


def rotate_reference(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor]:
    """The obvious twin of `rotate`."""

    def turned(states: Tensor) -> Tensor:
        first, second = states.float().chunk(2, -1)
        across = torch.cat([-second, first], -1)
        cosine, sine = cosines.float().unsqueeze(1), sines.float().unsqueeze(1)
        return (states.float() * cosine + across * sine).to(states.dtype)

    return turned(query), turned(key)


def turn_heads_reference(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norms: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """The obvious twin of `turn_heads`, whose result it returns."""
    wide = heads.float()
    if norms is not None:
        wide = rms_norm_reference(wide, norms, epsilon)
    states = wide.transpose(0, 1).unsqueeze(0)
    turned, _ = rotate_reference(states, states, cosines, sines)
    return turned.squeeze(0).transpose(0, 1).to(heads.dtype)

"""Fused elementwise operations, those between the matrix products of a transformer layer, each in
one pass over memory.

Each computes in float32 and rounds once, at its end.
"""

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kernels.dispatch import HAS_TRITON, Implementation, choose

if HAS_TRITON:
    from kernels.gpu.fused.activation import gated_activation_triton
    from kernels.gpu.fused.norm import add_rms_norm_triton, rms_norm_triton
    from kernels.gpu.fused.rotation import qk_norm_rope_triton, rope_triton
    from kernels.gpu.fused.tiles import MOST_NORM_NUMBERS


class Activation(IntEnum):
    """Activations, numbered as in C++."""

    SILU = 0
    GELU_TANH = 1


def rms_norm(
    states: Tensor, weight: Tensor, epsilon: float, *, implementation: Implementation | None = None
) -> Tensor:
    """`states / sqrt(mean(states ** 2) + epsilon) * weight` over the last dimension.

    `weight` is float32. The result is dense, in the dtype of the states.
    """
    implementation = implementation or choose(states.device.type, (states.dtype,))
    if implementation.is_cpp:
        out: Tensor = torch.ops.quire.rms_norm(states, weight, epsilon, implementation.isa)
        return out
    if _is_in_triton(implementation, states):
        return rms_norm_triton(states, weight, epsilon)
    return rms_norm_reference(states, weight, epsilon)


def add_rms_norm(
    states: Tensor,
    added: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of both, and its `rms_norm`, which is that of the rounded sum."""
    implementation = implementation or choose(states.device.type, (states.dtype,))
    if _is_in_triton(implementation, states):
        return add_rms_norm_triton(states, added, weight, epsilon)
    total = states + added
    return total, rms_norm(total, weight, epsilon, implementation=implementation)


def _is_in_triton(implementation: Implementation, states: Tensor) -> bool:
    """Whether there is a kernel for rows of this length."""
    return implementation == Implementation.TRITON and states.shape[-1] <= MOST_NORM_NUMBERS


def gated_activation(
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    *,
    implementation: Implementation | None = None,
) -> Tensor:
    """`activation(gate) * up`, dense."""
    implementation = implementation or choose(gate.device.type, (gate.dtype,))
    if implementation.is_cpp:
        out: Tensor = torch.ops.quire.gated_activation(gate, up, activation, implementation.isa)
        return out
    if implementation == Implementation.TRITON:
        return gated_activation_triton(gate, up, activation)
    return gated_activation_reference(gate, up, activation)


def rope(
    query: Tensor,
    key: Tensor,
    cosines: Tensor,
    sines: Tensor,
    *,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., 2021) of query and key `[1, heads, num_tokens, dim]`,
    in the form that pairs number i with number `dim / 2 + i`.

    `cosines` and `sines` are `[1, num_tokens, dim]`, of the same dtype.
    """
    implementation = implementation or choose(query.device.type, (query.dtype,))
    if implementation.is_cpp:
        rotated: tuple[Tensor, Tensor] = torch.ops.quire.rope(
            query, key, cosines, sines, implementation.isa
        )
        return rotated
    if implementation == Implementation.TRITON:
        return rope_triton(query, key, cosines, sines)
    return rope_reference(query, key, cosines, sines)


def qk_norm_rope(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norms: Tensor | None = None,
    epsilon: float = 0.0,
    *,
    implementation: Implementation | None = None,
) -> None:
    """Apply `rope` to `heads [num_tokens, num_heads, dim]` in place; with weights, float32
    `norms [num_heads, dim]`, apply `rms_norm` first.

    `cosines` and `sines` are `[1, num_tokens, dim]`, of the same dtype.
    """
    implementation = implementation or choose(heads.device.type, (heads.dtype,))
    if implementation.is_cpp:
        torch.ops.quire.qk_norm_rope(heads, cosines, sines, norms, epsilon, implementation.isa)
    elif implementation == Implementation.TRITON:
        qk_norm_rope_triton(heads, cosines, sines, norms, epsilon)
    else:
        heads.copy_(qk_norm_rope_reference(heads, cosines, sines, norms, epsilon))


def rms_norm_reference(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The reference of `rms_norm`."""
    wide = states.float()
    factor = (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * factor * weight).to(states.dtype)


def add_rms_norm_reference(
    states: Tensor, added: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The reference of `add_rms_norm`."""
    total = states + added
    return total, rms_norm_reference(total, weight, epsilon)


def gated_activation_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The reference of `gated_activation`."""
    wide = gate.float()
    active = silu(wide) if activation == Activation.SILU else gelu(wide, approximate="tanh")
    return (active * up.float()).to(gate.dtype)


def rope_reference(
    query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference of `rope`."""

    def rotated(states: Tensor) -> Tensor:
        first, second = states.float().chunk(2, -1)
        across = torch.cat([-second, first], -1)
        cosine, sine = cosines.float().unsqueeze(1), sines.float().unsqueeze(1)
        return (states.float() * cosine + across * sine).to(states.dtype)

    return rotated(query), rotated(key)


def qk_norm_rope_reference(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
    norms: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """The reference of `qk_norm_rope`; returns the result."""
    wide = heads.float()
    if norms is not None:
        wide = rms_norm_reference(wide, norms, epsilon)
    states = wide.transpose(0, 1).unsqueeze(0)
    rotated, _ = rope_reference(states, states, cosines, sines)
    return rotated.squeeze(0).transpose(0, 1).to(heads.dtype)

"""Fused operations between a model's matrix products: norms, gated activations, rotary embeddings.

transformers writes these parts as many operations, each of which reads and writes all numbers. A
part is replaced only if on random numbers the fused one gives the same result. A model that
computes it differently keeps its own code.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature, unwrap
from types import FunctionType, MethodType
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from kernels.dispatch import Implementation
from kernels.fused import Activation, gated_activation, rms_norm, rope
from kernels.linear import PackedLinear
from kernels.tiled_linear import TiledLinear

log = structlog.get_logger()

# Largest difference, relative to the largest number: a few rounding errors.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Largest difference of activations, relative to the larger of input and result: two roundings of
# the type that they are used in, or half a step of rows that are rounded to 8 bits.
_ACTIVATION_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_ROUNDED_ACTIVATION_TOLERANCE = 1 / 254
# As the first where rows are rounded to 8 bits before they are multiplied: a rounding error that
# moves a number over a step changes the result by more.
ROUNDED_TOLERANCE = 0.02
_ROTATION = "apply_rotary_pos_emb"  # its name in all models of transformers


def has_kernels(implementation: Implementation) -> bool:
    """Whether the implementation has kernels for such parts."""
    return implementation.is_cpp or implementation == Implementation.TRITON


def fuse(network: nn.Module, implementation: Implementation) -> Counter[str]:
    """Replace parts where possible; return their number by kind."""
    if not has_kernels(implementation):
        return Counter()
    fused: Counter[str] = Counter()
    rotations: dict[FunctionType, FunctionType | None] = {}
    with torch.inference_mode():
        for module in network.modules():
            fused["norms"] += _fuse_norm(module, implementation)
            fused["gates"] += _fuse_gate(module, implementation)
            fused["rotations"] += _fuse_rotation(module, implementation, rotations)
    return fused


@dataclass(frozen=True)
class RmsNorm:
    """The forward pass of a root-mean-square norm."""

    weight: Tensor  # float32
    epsilon: float
    implementation: Implementation

    def __call__(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight, self.epsilon, implementation=self.implementation)


def _fuse_norm(module: nn.Module, implementation: Implementation) -> bool:
    """Replace a module that is a root-mean-square norm."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return False
    states = _random(3, len(weight), like=weight)
    # Some families store the weight minus 1.
    for offset in (0.0, 1.0):
        norm = RmsNorm(weight.detach().float() + offset, epsilon, implementation)
        if _has_one_argument(module) and _agree(module, norm, states):
            module.forward = norm
            return True
    return False


@dataclass
class GatedMlp:
    """The forward pass of a gated MLP: down(activation(gate) * up)."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module
    activation: Activation
    implementation: Implementation

    def __call__(self, states: Tensor) -> Any:
        gates, values = self.gate(states), self.up(states)
        active = gated_activation(
            gates, values, self.activation, implementation=self.implementation
        )
        return self.down(active)


def _fuse_gate(module: nn.Module, implementation: Implementation) -> bool:
    """Replace the activation of a module that is a gated MLP."""
    gate, up, down = (getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down"))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)):
        return False
    if not isinstance(down, nn.Linear) or not _has_one_argument(module):
        return False
    states = _random(3, gate.in_features, like=gate.weight)
    tolerance = ROUNDED_TOLERANCE if is_quantized(gate, up, down) else 0.0
    for activation in Activation:
        mlp = GatedMlp(gate, up, down, activation, implementation)
        if _has_activation(module, mlp) and _agree(module, mlp, states, at_least=tolerance):
            module.forward = mlp
            return True
    return False


def _has_activation(module: nn.Module, mlp: GatedMlp) -> bool:
    """Whether both compute the same between the products, over the whole range of gates and values:
    activations may have limits. Products and the roundings of 16 bits would hide a difference, so
    the products are left out, and the numbers are in float32."""
    weight = mlp.gate.get_parameter("weight")
    gates = torch.linspace(-30, 30, 1025, device=weight.device).unsqueeze(0)
    values = gates.flip(-1)
    products = ((mlp.gate, lambda _: gates), (mlp.up, lambda _: values), (mlp.down, _unchanged))
    try:
        with ExitStack() as stack:
            for layer, forward in products:
                stack.enter_context(replaced_forward(layer, forward))
            own, other = module(gates), mlp(gates)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    except Exception as error:  # Compilers of kernels have classes of their own for theirs.
        log.warning("a part of the model keeps its own code", reason=repr(error))
        return False
    if not isinstance(own, Tensor) or own.shape != other.shape:
        return False
    tolerance = _ACTIVATION_TOLERANCE.get(weight.dtype, 0.0)
    if is_quantized(mlp.gate, mlp.up, mlp.down):
        tolerance = max(tolerance, _ROUNDED_ACTIVATION_TOLERANCE)
    bound = tolerance * torch.maximum(own.abs(), values.abs())
    return bool(((own - other).abs() <= bound).all())


def _unchanged(states: Tensor) -> Tensor:
    return states


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give a module another forward pass within the context."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def is_quantized(*layers: nn.Module) -> bool:
    """Whether a layer has a quantised weight."""
    products = [layer.forward for layer in layers]
    return any(
        isinstance(one, TiledLinear) or (isinstance(one, PackedLinear) and one.weight.is_quantized)
        for one in products
    )


def _fuse_rotation(
    module: nn.Module,
    implementation: Implementation,
    known: dict[FunctionType, FunctionType | None],
) -> bool:
    """Replace the rotary embedding that a module's forward pass calls by name."""
    # Decorators of transformers rename deprecated arguments, which no call here has.
    forward = unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or _ROTATION not in forward.__code__.co_names:
        return False
    if forward not in known:
        known[forward] = _with_rotation(forward, implementation, next(module.parameters()))
    function = known[forward]
    if function is None:
        return False
    module.forward = MethodType(function, module)
    return True


def _with_rotation(
    forward: FunctionType, implementation: Implementation, like: Tensor
) -> FunctionType | None:
    """A copy of the code in which the name refers to the fused function; transformers' module is
    not changed. None if the result would differ."""
    original = forward.__globals__.get(_ROTATION)
    query, key = _random(1, 4, 3, 16, like=like), _random(1, 2, 3, 16, like=like)
    cosines, sines = _random(1, 3, 16, like=like).cos(), _random(1, 3, 16, like=like).sin()
    states = (query, key, cosines, sines)
    rotated = partial(rope, implementation=implementation)
    if original is None or not _agree(original, rotated, *states):
        return None

    def rotation(
        query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *args: Any, **named: Any
    ) -> Any:
        usual = query.dtype == key.dtype == cosines.dtype and cosines.dim() == 3
        if args or named or not usual or cosines.shape[-1] != query.shape[-1]:
            return original(query, key, cosines, sines, *args, **named)
        return rope(query, key, cosines, sines, implementation=implementation)

    copy = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTATION: rotation},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _has_one_argument(module: nn.Module) -> bool:
    return len(signature(module.forward).parameters) == 1


def _random(*shape: int, like: Tensor) -> Tensor:
    """Numbers of a generator of their own, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _agree(
    own: Callable[..., Any], other: Callable[..., Any], *states: Tensor, at_least: float = 0.0
) -> bool:
    """Whether both give the same result, within the tolerance of its type or the one given; False
    if one raises."""
    try:
        own_results, other_results = own(*states), other(*states)
    except (RuntimeError, TypeError, ValueError):
        return False
    except Exception as error:  # Compilers of kernels have classes of their own for theirs.
        log.warning("a part of the model keeps its own code", reason=repr(error))
        return False
    if isinstance(own_results, Tensor):
        own_results, other_results = (own_results,), (other_results,)
    return len(own_results) == len(other_results) and all(
        _are_close(*both, at_least) for both in zip(own_results, other_results, strict=True)
    )


def _are_close(result: object, other: object, at_least: float) -> bool:
    if not isinstance(result, Tensor) or not isinstance(other, Tensor):
        return False
    if result.shape != other.shape or result.dtype != other.dtype:
        return False
    tolerance = max(_TOLERANCE.get(result.dtype, 0.0), at_least)
    bound = tolerance * result.float().abs().max()
    return bool(((result.float() - other.float()).abs() <= bound).all())

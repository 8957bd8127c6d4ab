"""Calls of a model's layers, recorded before anything is replaced: which layers are made of parts
that can be replaced, and what a fused layer has to reproduce."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import pairwise
from typing import Any, Final

import structlog
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kernels.dispatch import Implementation
from worker_svc.model.attention import set_attention
from worker_svc.model.elementwise_fusion import ROUNDED_TOLERANCE, RmsNorm, has_kernels

log = structlog.get_logger()

_LAYER_NAMES: Final = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
QKV: Final = ("q_proj", "k_proj", "v_proj")
_PROJECTIONS: Final = {*QKV, "o_proj"}
HEAD_NORMS: Final = {"q_norm", "k_norm"}
# What the attention of such a layer mentions besides its projections and norms.
_ATTENTION_NAMES: Final = {
    *("shape", "head_dim", "view", "reshape", "transpose", "contiguous", "layer_idx", "update"),
    *("apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS", "get_interface", "getattr", "config"),
    *("_attn_implementation", "eager_attention_forward", "attention_dropout", "training"),
    *("scaling", "sliding_window"),
}
# Largest difference, relative to the largest number that is added to a token: rounding errors of
# several operations.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass
class LayerCall:
    """A call of a layer: its arguments and its output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    # Of its attention: query heads, key heads, the dimensions of both.
    shape: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@torch.inference_mode()
def record_layer_calls(network: Any, implementation: Implementation) -> Mapping[Any, LayerCall]:
    """Run a few tokens through an unmodified model and record the calls of the layers that may be
    replaced. Leaves another attention function in the model."""
    layers = {layer: LayerCall((), {}, None) for layer in _candidates(network)}
    if not has_kernels(implementation) or not layers:
        return {}
    by_attention = {layer.self_attn: call for layer, call in layers.items()}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        call = by_attention.get(module)
        if call is not None:
            call.shape = (query.shape[1], key.shape[1], *(x.shape[3] for x in (query, value)))
            call.arguments = kwargs
        return _plain_attention(query, key, value, kwargs.get("scaling")), None

    def record(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = layers[layer]
        call.args, call.kwargs, call.output = args, kwargs, output

    set_attention(network, attend)
    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    tokens, positions = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 3, 6]])
    device = network.device
    network(input_ids=tokens.to(device), position_ids=positions.to(device), use_cache=False)
    for hook in hooks:
        hook.remove()
    # The network keeps the function until it is replaced.
    by_attention.clear()
    return layers


def return_input(states: Tensor, **unused: object) -> Tensor:
    return states


def are_consecutive(calls: Sequence[LayerCall]) -> bool:
    """Whether each layer's input is the previous output, with the same position embeddings."""
    return bool(calls) and all(
        after.args[0] is before.output
        and after.kwargs["position_embeddings"] is before.kwargs["position_embeddings"]
        for before, after in pairwise(calls)
    )


def _candidates(network: nn.Module) -> Iterator[Any]:
    """Layers whose code mentions only parts that are replaced here."""
    known = _ATTENTION_NAMES | _PROJECTIONS | HEAD_NORMS
    for module in network.modules():
        layer: Any = module
        if names_of(layer) == _LAYER_NAMES and known >= names_of(layer.self_attn) >= _PROJECTIONS:
            yield layer


def names_of(module: nn.Module) -> set[str]:
    """The names that the code of its forward pass mentions."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return {"unknown"} if code is None else set(code.co_names)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    attended = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)


def are_alike(norms: Sequence[RmsNorm], dim: int) -> bool:
    """Whether all have this dimension and one epsilon."""
    kinds = {(norm.epsilon, len(norm.weight)) for norm in norms}
    return len(kinds) <= 1 and all(len(norm.weight) == dim for norm in norms)


def per_head(norms: Sequence[RmsNorm], counts: Sequence[int]) -> Tensor | None:
    """The weights of the norms, each for a number of heads; None if there are no norms."""
    if not norms:
        return None
    return torch.cat([one.weight.expand(n, -1) for one, n in zip(norms, counts, strict=True)])


def reproduces(layer: Callable[..., Tensor], call: LayerCall, is_quantized: bool) -> bool:
    """Whether the layer adds the same as in the recorded call; False if it raises. More may differ
    if its weights are quantised."""
    states, output = call.args[0], call.output
    try:
        result = layer(*call.args, **call.kwargs)
    except Exception as error:  # Compilers of kernels have classes of their own for theirs.
        log.warning("a decoder layer keeps its own code", reason=repr(error))
        return False
    if not isinstance(output, Tensor) or result.shape != output.shape:
        return False
    if result.dtype != output.dtype:
        return False
    added = (output.float() - states.float()).abs().amax(-1, keepdim=True)
    rounding = 2 * torch.finfo(output.dtype).eps * output.float().abs()
    tolerance = _TOLERANCE[output.dtype]
    if is_quantized:
        tolerance = max(tolerance, ROUNDED_TOLERANCE)
    bound = tolerance * added + rounding
    return bool(((result.float() - output.float()).abs() <= bound).all())

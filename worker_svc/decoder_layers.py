"""Decoder layers in few operations: norm, one product for queries, keys and values, rotation,
attention, and products that add to what came in.

A layer of transformers is exchanged if its code mentions nothing but that, if its parts were
exchanged each for itself, and if the whole gives, of the model's own states, what the layer gave
before anything was.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from itertools import pairwise
from typing import Any, Final

import structlog
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.choice import Implementation
from kernels.decoder import DecoderWeights, LayerWeights
from kernels.fused import Activation, rms_norm, turn_heads
from kernels.linear import Product
from worker_svc.attention import PagedAttention, attend_with
from worker_svc.fusing import RmsNorm
from worker_svc.packing import GatedProducts, products_of

log = structlog.get_logger()

_LAYER_NAMES: Final = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_JOINED: Final = ("q_proj", "k_proj", "v_proj")
_PROJECTIONS: Final = {*_JOINED, "o_proj"}
_HEAD_NORMS: Final = {"q_norm", "k_norm"}
# What the attention of such a layer mentions beside its projections and norms.
_ATTENTION_NAMES: Final = {
    *("shape", "head_dim", "view", "reshape", "transpose", "contiguous", "layer_idx", "update"),
    *("apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS", "get_interface", "getattr", "config"),
    *("_attn_implementation", "eager_attention_forward", "attention_dropout", "training"),
    *("scaling", "sliding_window"),
}
# Largest difference, to the largest number that is added to a token: many roundings, not another
# result.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass
class LayerExample:
    """What a layer was called with once, and what it gave."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    # Of its attention: heads, those of keys, their dimensions; then what else it was called with.
    shape: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DecoderLayer:
    """The forward pass of a decoder layer."""

    attention: Any  # the module, whose configuration names the attention function
    weights: LayerWeights
    num_heads: int
    num_kv_heads: int
    activation: Activation

    @property
    def attention_function(self) -> Any:
        return ALL_ATTENTION_FUNCTIONS[self.attention.config._attn_implementation]

    def __call__(
        self, states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **unused: object
    ) -> Tensor:
        own = self.weights
        query, key, value = self._heads(states, *position_embeddings)
        attended, _ = self.attention_function(
            self.attention,
            query,
            key,
            value,
            None,
            scaling=own.scale,
            sliding_window=own.sliding_window,
        )
        states = own.out(attended.flatten(2), states)
        gates = rms_norm(states, own.mlp_norm, own.mlp_epsilon, implementation=self._implementation)
        return GatedProducts(own.gate, own.up, own.down, self.activation)(gates, states)

    def _heads(self, states: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values as transformers has them, `[1, heads, num_tokens, dim]`."""
        own = self.weights
        normed = rms_norm(
            states,
            own.attention_norm,
            own.attention_epsilon,
            implementation=self._implementation,
        )
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        heads = own.heads(normed).view(states.shape[1], sum(counts), -1)
        turn_heads(
            heads[:, : sum(counts[:2])],
            cosines,
            sines,
            own.head_norms,
            own.head_epsilon,
            implementation=self._implementation,
        )
        return heads.transpose(0, 1).unsqueeze(0).split_with_sizes(counts, 1)

    @property
    def _implementation(self) -> Implementation:
        return self.weights.heads.weight.implementation


@dataclass(frozen=True)
class LayerStack:
    """The forward pass of all layers of a model: in one call where its attention is our own."""

    layers: Sequence[DecoderLayer]
    weights: DecoderWeights

    @property
    def own_attention(self) -> PagedAttention | None:
        """What the layers attend with, if it can run all of them in one call."""
        attention = self.layers[0].attention_function
        if isinstance(attention, PagedAttention) and attention.runs(self.weights):
            return attention
        return None

    def __call__(
        self, states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **unused: object
    ) -> Tensor:
        attention = self.own_attention
        if attention is not None:
            return attention.run(self.weights, states.squeeze(0), *position_embeddings).unsqueeze(0)
        for layer in self.layers:
            states = layer(states, position_embeddings=position_embeddings)
        return states


@torch.inference_mode()
def layer_examples(network: Any, implementation: Implementation) -> Mapping[Any, LayerExample]:
    """Runs a few tokens through a model of which nothing was exchanged so far, and notes what its
    layers that may be exchanged are given and give. Afterwards it has another attention."""
    layers = {layer: LayerExample((), {}, None) for layer in _candidates(network)}
    if not implementation.is_cpp or not layers:
        return {}
    by_attention = {layer.self_attn: example for layer, example in layers.items()}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        example = by_attention.get(module)
        if example is not None:
            example.shape = (query.shape[1], key.shape[1], *(x.shape[3] for x in (query, value)))
            example.arguments = kwargs
        return _plain_attention(query, key, value, kwargs.get("scaling")), None

    def note(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        example = layers[layer]
        example.args, example.kwargs, example.output = args, kwargs, output

    attend_with(network, attend)
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    tokens, positions = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 3, 6]])
    network(input_ids=tokens, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    # The network keeps the function until it is given another one.
    by_attention.clear()
    return layers


@torch.inference_mode()
def join_layers(examples: Mapping[Any, LayerExample]) -> Counter[str]:
    """Exchanges what layers it can of a model that is fused and packed; says how many."""
    joined: dict[Any, DecoderLayer] = {}
    for module, example in examples.items():
        layer = _joined(module, example)
        if layer is not None and _agrees(layer, example):
            joined[module] = module.forward = layer
            for name in _JOINED:
                # Their weights are in the joined one.
                del module.self_attn.get_submodule(name).forward
    counts = Counter(layers=len(joined))
    if len(joined) == len(examples) and _follow_each_other(list(examples.values())):
        counts["layers in one call"] = _stack(joined)
    return counts


def _stack(joined: Mapping[Any, DecoderLayer]) -> int:
    """The first layer runs all of them; the others pass on what they are given."""
    layers = list(joined.values())
    if len({(one.num_heads, one.num_kv_heads, one.activation) for one in layers}) != 1:
        return 0
    weights = DecoderWeights(
        [one.weights for one in layers], layers[0].num_heads, layers[0].activation
    )
    first, *others = joined
    first.forward = LayerStack(layers, weights)
    for module in others:
        module.forward = _pass_on
    return len(layers)


def _pass_on(states: Tensor, **unused: object) -> Tensor:
    return states


def _follow_each_other(examples: Sequence[LayerExample]) -> bool:
    """Whether each gets what the one before it gave, with the same embeddings of positions."""
    return bool(examples) and all(
        after.args[0] is before.output
        and after.kwargs["position_embeddings"] is before.kwargs["position_embeddings"]
        for before, after in pairwise(examples)
    )


def _candidates(network: nn.Module) -> Iterator[Any]:
    """Layers whose code mentions nothing that is not done here."""
    known = _ATTENTION_NAMES | _PROJECTIONS | _HEAD_NORMS
    for module in network.modules():
        layer: Any = module
        if _names(layer) == _LAYER_NAMES and known >= _names(layer.self_attn) >= _PROJECTIONS:
            yield layer


def _names(module: nn.Module) -> set[str]:
    """What the code of its forward pass mentions."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return {"unknown"} if code is None else set(code.co_names)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    attended = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)


def _joined(module: Any, example: LayerExample) -> DecoderLayer | None:
    """The layer as its parts say it; None if they are not what they have to be."""
    attention = module.self_attn
    # Its rotation was exchanged: on random numbers it turns what `turn_heads` turns.
    if not example.shape or not example.args or "forward" not in vars(attention):
        return None
    products = products_of(*(getattr(attention, name) for name in _JOINED), attention.o_proj)
    norms = [module.input_layernorm.forward, module.post_attention_layernorm.forward]
    mlp = module.mlp.forward
    num_heads, num_kv_heads, dim, value_dim = example.shape
    if products is None or not isinstance(mlp, GatedProducts) or value_dim != dim:
        return None
    if _names(attention) >= _HEAD_NORMS:
        norms += [attention.q_norm.forward, attention.k_norm.forward]
    if not all(isinstance(norm, RmsNorm) for norm in norms):
        return None
    attention_norm, mlp_norm, *head_norms = norms
    if not _are_alike(head_norms, dim):
        return None
    weights = LayerWeights(
        attention_norm=attention_norm.weight,
        attention_epsilon=attention_norm.epsilon,
        heads=Product.joined(products[:3]),
        head_norms=_per_head(head_norms, (num_heads, num_kv_heads)),
        head_epsilon=head_norms[0].epsilon if head_norms else 0.0,
        scale=example.arguments.get("scaling") or dim**-0.5,
        sliding_window=example.arguments.get("sliding_window"),
        out=products[3],
        mlp_norm=mlp_norm.weight,
        mlp_epsilon=mlp_norm.epsilon,
        gate=mlp.gate,
        up=mlp.up,
        down=mlp.down,
    )
    return DecoderLayer(attention, weights, num_heads, num_kv_heads, mlp.activation)


def _are_alike(norms: Sequence[RmsNorm], dim: int) -> bool:
    """Whether they are of heads of this dimension, with one epsilon."""
    kinds = {(norm.epsilon, len(norm.weight)) for norm in norms}
    return len(kinds) <= 1 and all(len(norm.weight) == dim for norm in norms)


def _per_head(norms: Sequence[RmsNorm], counts: tuple[int, int]) -> Tensor | None:
    if not norms:
        return None
    rows = torch.stack([norm.weight for norm in norms])
    return rows.repeat_interleave(torch.tensor(counts), 0)


def _agrees(layer: DecoderLayer, example: LayerExample) -> bool:
    """Whether the layer adds what was added in the example; one that fails on it does not."""
    states, output = example.args[0], example.output
    try:
        result = layer(*example.args, **example.kwargs)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.warning("a decoder layer keeps its own code", error=str(error))
        return False
    if not isinstance(output, Tensor) or result.shape != output.shape:
        return False
    if result.dtype != output.dtype:
        return False
    added = (output.float() - states.float()).abs().amax(-1, keepdim=True)
    rounding = 2 * torch.finfo(output.dtype).eps * output.float().abs()
    bound = _TOLERANCE[output.dtype] * added + rounding
    return bool(((result.float() - output.float()).abs() <= bound).all())

"""Fused decoder layers: norm, one product for queries, keys and values, RoPE, attention, and
products that add the residual.

A layer of transformers is replaced if its code mentions nothing else, if each of its parts was
replaced, and if the fused layer reproduces the output of the original on the model's own states.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.decoder import DecoderWeights, LayerWeights
from kernels.dispatch import Implementation
from kernels.exchange import Exchange
from kernels.fused import Activation, qk_norm_rope, rms_norm
from kernels.linear import PackedLinear
from worker_svc.model.elementwise_fusion import RmsNorm
from worker_svc.model.layer_calls import (
    HEAD_NORMS,
    QKV,
    LayerCall,
    are_alike,
    are_consecutive,
    names_of,
    per_head,
    reproduces,
    return_input,
)
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.weight_packing import PackedGatedMlp, products_of
from worker_svc.ranks.group import RankGroup

log = structlog.get_logger()


@dataclass(frozen=True)
class DecoderLayer:
    """The forward pass of a decoder layer."""

    attention: Any  # the module; its config names the attention function
    weights: LayerWeights
    num_heads: int
    num_kv_heads: int
    activation: Activation
    # With ranks the weights are those of a shard, and products that add the residual are summed.
    ranks: RankGroup | None = None

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
        states = self._sum(own.o_proj(attended.flatten(2), self._residual(states)))
        gates = rms_norm(states, own.mlp_norm, own.mlp_epsilon, implementation=self._implementation)
        mlp = PackedGatedMlp(own.gate, own.up, own.down, self.activation)
        return self._sum(mlp(gates, self._residual(states)))

    def _residual(self, states: Tensor) -> Tensor | None:
        """Only the first rank adds it: it is part of the sum."""
        return states if self.ranks is None or self.ranks.is_first else None

    def _sum(self, states: Tensor) -> Tensor:
        return states if self.ranks is None else self.ranks.sum(states)

    def _heads(self, states: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values in transformers' layout `[1, heads, num_tokens, dim]`."""
        own = self.weights
        normed = rms_norm(
            states,
            own.attention_norm,
            own.attention_epsilon,
            implementation=self._implementation,
        )
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        heads = own.qkv_proj(normed).view(states.shape[1], sum(counts), -1)
        qk_norm_rope(
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
        return self.weights.qkv_proj.weight.implementation


@dataclass(frozen=True)
class LayerStack:
    """The forward pass of all layers of a model, in one call if the attention is paged."""

    layers: Sequence[DecoderLayer]
    weights: DecoderWeights

    @property
    def exchange(self) -> Exchange | None:
        """That of the ranks which have the other shards of these layers."""
        ranks = self.layers[0].ranks
        return None if ranks is None else ranks.shared

    def attention_for(self, num_tokens: int) -> PagedAttention | None:
        """The attention function if it can run all layers over so many tokens in one call."""
        if self.layers[0].ranks is not None and not self._can_exchange(num_tokens):
            return None
        attention = self.layers[0].attention_function
        if isinstance(attention, PagedAttention) and attention.can_run(self.weights):
            return attention
        return None

    def __call__(
        self, states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **unused: object
    ) -> Tensor:
        attention = self.attention_for(states.shape[1])
        if attention is not None:
            states = attention.run_layers(
                self.weights, states.squeeze(0), *position_embeddings, self.exchange
            )
            return states.unsqueeze(0)
        for layer in self.layers:
            states = layer(states, position_embeddings=position_embeddings)
        return states

    def _can_exchange(self, num_tokens: int) -> bool:
        """Whether the ranks have memory for so many hidden states."""
        own = self.layers[0].weights
        num_bytes = num_tokens * len(own.attention_norm) * own.qkv_proj.weight.dtype.itemsize
        return self.exchange is not None and num_bytes <= self.exchange.slot_bytes


@torch.inference_mode()
def fuse_layers(calls: Mapping[Any, LayerCall]) -> Counter[str]:
    """Replace the layers of a model after `fuse` and `pack`, where possible; return counts."""
    fused: dict[Any, DecoderLayer] = {}
    for module, call in calls.items():
        layer = _fused_layer(module, call)
        if layer is None:
            continue
        if reproduces(layer, call, layer.weights.qkv_proj.weight.is_quantized):
            fused[module] = module.forward = layer
            for name in QKV:
                # Their weights are now part of the fused product.
                del module.self_attn.get_submodule(name).forward
    counts = Counter(layers=len(fused))
    if len(fused) == len(calls) and are_consecutive(list(calls.values())):
        counts["layers in one call"] = _stack(fused)
    return counts


def _stack(fused: Mapping[Any, DecoderLayer]) -> int:
    """The first layer runs all of them; every later one returns its input."""
    layers = list(fused.values())
    if len({(one.num_heads, one.num_kv_heads, one.activation) for one in layers}) != 1:
        return 0
    weights = DecoderWeights(
        [one.weights for one in layers], layers[0].num_heads, layers[0].activation
    )
    first, *rest = fused
    first.forward = LayerStack(layers, weights)
    for module in rest:
        module.forward = return_input
    return len(layers)


def _fused_layer(module: Any, call: LayerCall) -> DecoderLayer | None:
    """The fused layer; None if one of its parts was not replaced."""
    attention = module.self_attn
    # A replaced `forward` means that `qk_norm_rope` gives what the layer's own code gives.
    if not call.shape or not call.args or "forward" not in vars(attention):
        return None
    products = products_of(*(getattr(attention, name) for name in QKV), attention.o_proj)
    norms = [module.input_layernorm.forward, module.post_attention_layernorm.forward]
    mlp = module.mlp.forward
    num_heads, num_kv_heads, dim, value_dim = call.shape
    if products is None or not isinstance(mlp, PackedGatedMlp) or value_dim != dim:
        return None
    if names_of(attention) >= HEAD_NORMS:
        norms += [attention.q_norm.forward, attention.k_norm.forward]
    if not all(isinstance(norm, RmsNorm) for norm in norms):
        return None
    attention_norm, mlp_norm, *head_norms = norms
    qkv_proj = _joined(products[:3])
    if qkv_proj is None or not are_alike(head_norms, dim):
        return None
    weights = LayerWeights(
        attention_norm=attention_norm.weight,
        attention_epsilon=attention_norm.epsilon,
        qkv_proj=qkv_proj,
        head_norms=per_head(head_norms, (num_heads, num_kv_heads)),
        head_epsilon=head_norms[0].epsilon if head_norms else 0.0,
        scale=call.arguments.get("scaling") or dim**-0.5,
        sliding_window=call.arguments.get("sliding_window"),
        o_proj=products[3],
        mlp_norm=mlp_norm.weight,
        mlp_epsilon=mlp_norm.epsilon,
        gate=mlp.gate,
        up=mlp.up,
        down=mlp.down,
    )
    return DecoderLayer(attention, weights, num_heads, num_kv_heads, mlp.activation)


def _joined(products: Sequence[PackedLinear]) -> PackedLinear | None:
    """One product for all; None if their quantised weights have inputs in different orders."""
    try:
        return PackedLinear.joined(products)
    except ValueError as error:
        log.warning("a decoder layer keeps its own code", reason=str(error))
        return None

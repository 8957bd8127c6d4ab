"""Decoder layers that launch few kernels on a GPU. A norm adds the residual before it, also that of
the layer before. Queries, keys and values come from one product, and its heads get norm and rotary
embedding in one launch.

Other parts are called as modules, so that their hooks, such as sums over ranks, remain.
`worker_svc/model/layer_calls.py` finds the layers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.dispatch import Implementation
from kernels.fused import add_rms_norm, qk_norm_rope
from worker_svc.model.device.joined_products import Joined, join, join_gate, release
from worker_svc.model.elementwise_fusion import RmsNorm, is_quantized
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


@dataclass(frozen=True)
class DeviceLayer:
    """The forward pass of a decoder layer, but for its last addition."""

    module: Any  # the layer of transformers
    attention_norm: RmsNorm
    mlp_norm: RmsNorm
    qkv_proj: Joined | None  # None: three products
    num_heads: int
    num_kv_heads: int
    head_norms: Tensor | None  # float32 [num_heads + num_kv_heads, dim]
    head_epsilon: float
    scale: float | None
    sliding_window: int | None
    implementation: Implementation

    def __call__(
        self, states: Tensor, added: Tensor | None, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Take hidden states and what is to be added to them; return the same of the next layer.

        `angles` are cosines and sines.
        """
        states, normed = self._normed(self.attention_norm, states, added)
        attention = self.module.self_attn
        function = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        attended, _ = function(
            attention,
            *self._heads(normed, angles),
            None,
            scaling=self.scale,
            sliding_window=self.sliding_window,
        )
        added = attention.o_proj(attended.flatten(2))
        states, normed = self._normed(self.mlp_norm, states, added)
        return states, self.module.mlp(normed)

    def _normed(self, norm: RmsNorm, states: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum and its norm."""
        if added is None:
            return states, norm(states)
        return add_rms_norm(
            states, added, norm.weight, norm.epsilon, implementation=self.implementation
        )

    def _heads(self, normed: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries, keys and values in transformers' layout `[1, heads, num_tokens, dim]`."""
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        num_tokens, num_rotated = normed.shape[1], sum(counts[:2])
        if self.qkv_proj is not None:
            heads = self.qkv_proj(normed).view(num_tokens, sum(counts), -1)
            self._rotate(heads[:, :num_rotated], angles, slice(None))
            return heads.transpose(0, 1).unsqueeze(0).split_with_sizes(counts, 1)
        attention = self.module.self_attn
        query, key, value = (
            getattr(attention, name)(normed).view(num_tokens, count, -1)
            for name, count in zip(QKV, counts, strict=True)
        )
        self._rotate(query, angles, slice(self.num_heads))
        self._rotate(key, angles, slice(self.num_heads, num_rotated))
        query, key, value = (one.transpose(0, 1).unsqueeze(0) for one in (query, key, value))
        return query, key, value

    def _rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor], which: slice) -> None:
        """Norms and rotary embedding of some heads, in place."""
        norms = None if self.head_norms is None else self.head_norms[which]
        qk_norm_rope(heads, *angles, norms, self.head_epsilon, implementation=self.implementation)


@dataclass(frozen=True)
class DeviceLayers:
    """The forward pass of layers that follow one another."""

    layers: Sequence[DeviceLayer]

    def __call__(
        self, states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **unused: object
    ) -> Tensor:
        added: Tensor | None = None
        for layer in self.layers:
            states, added = layer(states, added, position_embeddings)
        return states if added is None else states + added


@torch.inference_mode()
def fuse_device_layers(
    network: Any, calls: Mapping[Any, LayerCall], implementation: Implementation
) -> Counter[str]:
    """Join products, and replace layers, after `fuse`, where possible; return counts."""
    counts = Counter({"gated products": sum(map(join_gate, network.modules()))})
    fused: dict[Any, DeviceLayer] = {}
    for module, call in calls.items():
        layer = _fused_layer(module, call, implementation)
        if layer is None:
            continue
        has_integers = is_quantized(*module.self_attn.modules(), *module.mlp.modules())
        if reproduces(DeviceLayers([layer]), call, has_integers):
            fused[module] = layer
            module.forward = DeviceLayers([layer])
            if layer.qkv_proj is not None:
                release([getattr(module.self_attn, name) for name in QKV])
    counts["layers"] = len(fused)
    if len(fused) == len(calls) and are_consecutive(list(calls.values())):
        # The first layer runs all of them; every later one returns its input.
        first, *rest = fused
        first.forward = DeviceLayers(list(fused.values()))
        for module in rest:
            module.forward = return_input
        counts["layers in one call"] = len(fused)
    return counts


def _fused_layer(
    module: Any, call: LayerCall, implementation: Implementation
) -> DeviceLayer | None:
    """The fused layer; None if one of its parts was not replaced."""
    attention = module.self_attn
    # A replaced `forward` means that `qk_norm_rope` gives what the layer's own code gives.
    if not call.shape or not call.args or "forward" not in vars(attention):
        return None
    num_heads, num_kv_heads, dim, value_dim = call.shape
    norms = [module.input_layernorm.forward, module.post_attention_layernorm.forward]
    if names_of(attention) >= HEAD_NORMS:
        norms += [attention.q_norm.forward, attention.k_norm.forward]
    if value_dim != dim or not all(isinstance(norm, RmsNorm) for norm in norms):
        return None
    attention_norm, mlp_norm, *head_norms = norms
    if not are_alike(head_norms, dim):
        return None
    return DeviceLayer(
        module=module,
        attention_norm=attention_norm,
        mlp_norm=mlp_norm,
        qkv_proj=join([getattr(attention, name) for name in QKV]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_norms=per_head(head_norms, (num_heads, num_kv_heads)),
        head_epsilon=head_norms[0].epsilon if head_norms else 0.0,
        scale=call.arguments.get("scaling"),
        sliding_window=call.arguments.get("sliding_window"),
        implementation=implementation,
    )

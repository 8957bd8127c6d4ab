"""Decoder layers, or the whole forward pass of a model made of them, in one call; nothing goes back
to Python in between.

It is what `rms_norm`, `linear`, `turn_heads`, `kv_write`, `paged_attention` and `gated_linear` are,
one after the other, and gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.choice import Implementation
from kernels.fused import Activation
from kernels.linear import Product
from kernels.paged_batch import PagedBatch


@dataclass(frozen=True)
class LayerWeights:
    """What one layer is made of. `heads` gives queries, keys and values, in this order."""

    attention_norm: Tensor  # float32
    attention_epsilon: float
    heads: Product
    head_norms: Tensor | None  # float32 [num_heads + num_kv_heads, head_dim]
    head_epsilon: float
    scale: float  # of scores
    sliding_window: int | None
    out: Product
    mlp_norm: Tensor  # float32
    mlp_epsilon: float
    gate: Product
    up: Product
    down: Product


class DecoderWeights:
    """Layers of one shape, in the lists that the kernel takes."""

    def __init__(
        self, layers: Sequence[LayerWeights], num_heads: int, activation: Activation
    ) -> None:
        """`num_heads` are those of queries; the activation is that of the gates."""
        products = [(one.heads, one.out, one.gate, one.up, one.down) for one in layers]
        self.num_layers = len(layers)
        self.implementation: Implementation = layers[0].heads.weight.implementation
        self.num_heads = num_heads
        self.activation = activation
        self.norms = [norm for one in layers for norm in (one.attention_norm, one.mlp_norm)]
        self.panels = [product.weight.panels for five in products for product in five]
        self.biases = [product.bias for five in products for product in five]
        self.head_norms = [one.head_norms for one in layers]
        self.epsilons = [
            epsilon
            for one in layers
            for epsilon in (one.attention_epsilon, one.mlp_epsilon, one.head_epsilon)
        ]
        self.scales = [one.scale for one in layers]
        self.windows = [one.sliding_window or 0 for one in layers]


@dataclass(frozen=True)
class Ends:
    """What a model has before its layers and behind them."""

    # Panels of any width, as `PackedWeight` has them, or a matrix `[rows, hidden_size, 1]`.
    embedding: Tensor
    num_embeddings: int
    cosines: Tensor  # [max_positions, head_dim]
    sines: Tensor
    norm: Tensor  # float32
    epsilon: float
    head: Product


def decoder_layers(
    states: Tensor,
    cosines: Tensor,
    sines: Tensor,
    weights: DecoderWeights,
    caches: Sequence[Tensor],
    batch: PagedBatch,
    slot_mapping: Tensor,
    kv_scales: Sequence[float],
) -> Tensor:
    """What the layers make of `states [num_tokens, hidden_size]`.

    `cosines` and `sines` are `[1, num_tokens, head_dim]`. `caches` are those of keys and of values
    of each layer in turn, as `kv_write` has them, with the scales of each; the step's own keys and
    values are written into the slots.
    """
    out: Tensor = torch.ops.quire.decoder_layers(
        states, cosines, sines, *_arguments(weights, caches, batch, slot_mapping, kv_scales)
    )
    return out


def decoder_pass(
    ids: Tensor,
    positions: Tensor,
    kept: Tensor,
    ends: Ends,
    weights: DecoderWeights,
    caches: Sequence[Tensor],
    batch: PagedBatch,
    slot_mapping: Tensor,
    kv_scales: Sequence[float],
) -> Tensor:
    """Logits `[len(kept), num_outputs]` of the tokens `kept`, in the model's dtype.

    `ids` and `positions` are int64 `[num_tokens]`. IndexError for an id, a position or a token that
    is not there. The rest is as `decoder_layers` has it.
    """
    out: Tensor = torch.ops.quire.decoder_pass(
        ids,
        positions,
        kept,
        ends.embedding,
        ends.num_embeddings,
        ends.cosines,
        ends.sines,
        ends.norm,
        ends.epsilon,
        ends.head.weight.panels,
        ends.head.bias,
        ends.head.weight.num_outputs,
        *_arguments(weights, caches, batch, slot_mapping, kv_scales),
    )
    return out


def _arguments(
    weights: DecoderWeights,
    caches: Sequence[Tensor],
    batch: PagedBatch,
    slot_mapping: Tensor,
    kv_scales: Sequence[float],
) -> tuple[object, ...]:
    """Those that both kernels have, in their order."""
    return (
        weights.norms,
        weights.panels,
        weights.biases,
        weights.head_norms,
        caches,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        slot_mapping,
        weights.epsilons,
        weights.scales,
        weights.windows,
        kv_scales,
        weights.num_heads,
        weights.activation,
        weights.implementation.isa,
    )

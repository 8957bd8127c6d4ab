"""Decoder layers, or the whole forward pass of a decoder model, in one call without Python between
operations.

Equivalent to `rms_norm`, `linear`, `qk_norm_rope`, `kv_write`, `paged_attention` and `gated_linear`
in sequence, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.exchange import Exchange
from kernels.fused import Activation
from kernels.inputs.paged_batch import PagedBatch
from kernels.linear import PackedLinear


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer. `qkv_proj` gives queries, keys and values, in this order."""

    attention_norm: Tensor  # float32
    attention_epsilon: float
    qkv_proj: PackedLinear
    head_norms: Tensor | None  # float32 [num_heads + num_kv_heads, head_dim]
    head_epsilon: float
    scale: float  # of scores
    sliding_window: int | None
    o_proj: PackedLinear
    mlp_norm: Tensor  # float32
    mlp_epsilon: float
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear


class DecoderWeights:
    """The weights of layers of one shape, as the kernel's object."""

    def __init__(
        self, layers: Sequence[LayerWeights], num_heads: int, activation: Activation
    ) -> None:
        """`num_heads` counts query heads; `activation` applies to the gates. RuntimeError without
        layers or heads."""
        products = [(one.qkv_proj, one.o_proj, one.gate, one.up, one.down) for one in layers]
        self.num_layers = len(layers)
        self.implementation: Implementation = layers[0].qkv_proj.weight.implementation
        weights = torch.classes.quire.DecoderWeights(
            [norm for one in layers for norm in (one.attention_norm, one.mlp_norm)],
            # The packed weights, five per layer: see `PackedWeight`.
            [product.weight.panels for five in products for product in five],
            [product.bias for five in products for product in five],
            [one.head_norms for one in layers],
            [
                epsilon
                for one in layers
                for epsilon in (one.attention_epsilon, one.mlp_epsilon, one.head_epsilon)
            ],
            [one.scale for one in layers],
            [one.sliding_window or 0 for one in layers],
            num_heads,
            activation,
            self.implementation.isa,
        )
        # The object's methods. To look one up takes time.
        self.run_layers, self.run_forward = weights.run_layers, weights.run_forward


class DecoderCaches:
    """The caches of layers, as the kernel's object."""

    def __init__(self, caches: Sequence[Tensor], kv_scales: Sequence[float]) -> None:
        """`caches` alternates key and value caches, layer by layer, as in `kv_write`, and
        `kv_scales` has the scale of each."""
        self.kernel_object = torch.classes.quire.DecoderCaches(list(caches), list(kv_scales))


@dataclass(frozen=True)
class EmbeddingAndHead:
    """The weights before and after a model's layers."""

    # Panels of any width, as in `PackedWeight`, or a matrix `[rows, hidden_size, 1]`.
    embedding: Tensor
    num_embeddings: int
    cosines: Tensor  # [max_positions, head_dim]
    sines: Tensor
    norm: Tensor  # float32
    epsilon: float
    lm_head: PackedLinear


def decoder_layers(
    hidden_states: Tensor,
    cosines: Tensor,
    sines: Tensor,
    weights: DecoderWeights,
    caches: DecoderCaches,
    batch: PagedBatch,
    slot_mapping: Tensor,
    exchange: Exchange | None = None,
) -> Tensor:
    """The layers' output for `hidden_states [num_tokens, hidden_size]`.

    `cosines` and `sines` are `[1, num_tokens, head_dim]`. The step's own keys and values are
    written into the slots. With an `exchange` the weights are this rank's shard of each layer, and
    the outputs of attention and MLP are summed over the ranks, of which the first adds the
    residual; `hidden_states` fit into a slot of it.
    """
    out: Tensor = weights.run_layers(
        caches.kernel_object,
        hidden_states,
        cosines,
        sines,
        *_arguments(batch, slot_mapping),
        _object(exchange),
    )
    return out


def decoder_forward(
    ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    embedding_and_head: EmbeddingAndHead,
    weights: DecoderWeights,
    caches: DecoderCaches,
    batch: PagedBatch,
    slot_mapping: Tensor,
    exchange: Exchange | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Float32 logits `[len(logits_indices), num_outputs]` of these tokens, rounded to the model's
    dtype; in `out` if given, whose rows are dense.

    `ids` and `positions` are int64 `[num_tokens]`. IndexError for an id, a position or a token out
    of range. Otherwise as `decoder_layers`. With an `exchange`, each rank has as many rows of the
    embedding and of the head, in the order of ranks, and gets the logits of its own.
    """
    head = embedding_and_head.lm_head
    logits: Tensor = weights.run_forward(
        caches.kernel_object,
        ids,
        positions,
        logits_indices,
        embedding_and_head.embedding,
        embedding_and_head.num_embeddings,
        embedding_and_head.cosines,
        embedding_and_head.sines,
        embedding_and_head.norm,
        embedding_and_head.epsilon,
        head.weight.panels,
        head.bias,
        head.weight.num_outputs,
        *_arguments(batch, slot_mapping),
        _object(exchange),
        out,
    )
    return logits


def _object(exchange: Exchange | None) -> Any:
    return None if exchange is None else exchange.kernel_object


def _arguments(batch: PagedBatch, slot_mapping: Tensor) -> tuple[Tensor, ...]:
    """The last arguments of both kernels, in order."""
    return batch.block_table, batch.query_start_loc, batch.seq_lens, slot_mapping

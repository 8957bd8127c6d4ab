"""A model that consists of packed weights alone, without the code and the modules of
transformers."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kernels.decoder import DecoderWeights, EmbeddingAndHead, LayerWeights
from kernels.fused import Activation, rms_norm
from kernels.linear import PackedWeight
from worker_svc.cache.kv_pool import AttentionSpecs
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import AttentionFunction, FinalStates


@dataclass(frozen=True)
class PackedNetwork:
    """A model whose forward pass is one call, and what the worker knows of it."""

    layers: tuple[LayerWeights, ...]
    num_heads: int
    activation: Activation
    embedding_and_head: EmbeddingAndHead
    attention: AttentionSpecs
    vocab_size: int
    dtype: torch.dtype
    max_model_len: int
    fingerprint: str  # in hexadecimal digits

    @cached_property
    def decoder(self) -> DecoderWeights:
        return DecoderWeights(self.layers, self.num_heads, self.activation)


class PackedModel:
    """A `ServedModel` on a CPU. Its attention is always paged."""

    device = torch.device("cpu")
    # It is never one of several stages.
    num_earlier_layers = num_later_layers = 0

    def __init__(self, network: PackedNetwork, weights: tuple[Path, ...]) -> None:
        """`weights` are the files that it was loaded from at first."""
        self.weights = weights
        self.layers = network.attention
        self.dtype = network.dtype
        self.max_model_len = network.max_model_len
        self.vocab_size = network.vocab_size
        self.fingerprint = bytes.fromhex(network.fingerprint)
        self.implementation = network.decoder.implementation
        self._network = network
        self._attention: PagedAttention

    def set_attention(self, function: AttentionFunction) -> None:
        """TypeError unless it is paged attention."""
        if not isinstance(function, PagedAttention):
            raise TypeError(f"a packed model with a {type(function).__name__}")
        self._attention = function

    def logits(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        logits = self._attention.run_forward(
            self._network.decoder,
            self._network.embedding_and_head,
            input_ids,
            positions,
            logits_indices,
        )
        return logits.float() if out is None else out.copy_(logits)

    def final_states(self, input_ids: Tensor, positions: Tensor) -> FinalStates:
        parts = self._network.embedding_and_head
        states = self._attention.run_layers(
            self._network.decoder,
            self._embedding.rows(input_ids),
            parts.cosines[positions].unsqueeze(0),
            parts.sines[positions].unsqueeze(0),
        )
        return FinalStates(states, self._head)

    @cached_property
    def _embedding(self) -> PackedWeight:
        parts = self._network.embedding_and_head
        implementation = parts.lm_head.weight.implementation
        return PackedWeight(parts.embedding, parts.num_embeddings, implementation, self.dtype)

    def _head(self, states: Tensor) -> Tensor:
        parts = self._network.embedding_and_head
        implementation = parts.lm_head.weight.implementation
        return parts.lm_head(
            rms_norm(states, parts.norm, parts.epsilon, implementation=implementation)
        )

"""Paged attention as an attention function of transformers.

transformers calls one function per attention layer and forward pass, by a registered name. Layers
are told apart by the order of these calls, which is the same in every pass.
"""

import secrets
from collections.abc import Callable

from torch import Tensor, nn
from transformers import AttentionInterface

from kernels.attention import PagedBatch, paged_attention
from kernels.choice import Implementation
from kernels.kv_write import kv_write
from worker_svc.kv_pool import LayerShape

# transformers calls it with a module, then query, key and value as `[1, heads, num_tokens, dim]`.
AttentionFunction = Callable[..., tuple[Tensor, None]]


class UnsupportedModelError(ValueError):
    """A model whose attention cannot be run on a paged cache."""


def register_attention(function: AttentionFunction) -> str:
    """Makes `function` known to transformers under a new name, which it returns.

    No mask is registered for the name, so transformers builds none: causality and windows are the
    function's own business.
    """
    name = f"quire_{secrets.token_hex(8)}"
    AttentionInterface.register(name, function)
    return name


class LayerProbe:
    """An attention function that attends to nothing and notes the shape of every layer."""

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise UnsupportedModelError(f"{type(module).__name__} insists on a mask of its own")
        if unused.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(module).__name__} attends to later tokens")
        self.layers.append(LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


class PagedAttention:
    """Writes keys and values of a step into the pool, then attends through the block table."""

    def __init__(
        self, layers: list[tuple[Tensor, Tensor]], implementation: Implementation | None = None
    ) -> None:
        """`implementation` is the one of both kernels; the best there is if absent."""
        self._layers = layers
        self._implementation = implementation
        self._batch: PagedBatch
        self._slot_mapping: Tensor
        self._next_layer = 0

    def begin(self, batch: PagedBatch, slot_mapping: Tensor) -> None:
        """To be called before each forward pass."""
        self._batch = batch
        self._slot_mapping = slot_mapping
        self._next_layer = 0

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        k_cache, v_cache = self._layers[self._next_layer]
        self._next_layer += 1
        key, value = _flat(key), _flat(value)
        kv_write(
            key,
            value,
            k_cache,
            v_cache,
            self._slot_mapping,
            implementation=self._implementation,
        )
        out = paged_attention(
            _flat(query),
            k_cache,
            v_cache,
            self._batch,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            implementation=self._implementation,
        )
        return out.unsqueeze(0), None


def _flat(states: Tensor) -> Tensor:
    """`[1, heads, num_tokens, dim]` to `[num_tokens, heads, dim]`."""
    return states.squeeze(0).transpose(0, 1)

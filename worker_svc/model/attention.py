"""Attention functions of transformers: registered, replaced, and one that probes a model.

transformers calls the function once per attention layer and forward pass, by a registered name. The
order of these calls, which is the same in every pass, identifies the layers.
"""

import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker_svc.cache.kv_pool import AttentionSpec
from worker_svc.model.served_model import AttentionFunction

_NAME_PREFIX: Final = "quire_"


class UnsupportedModelError(ValueError):
    """A model whose attention cannot be run on a paged cache."""


def register_attention(function: AttentionFunction) -> str:
    """Register `function` with transformers under a new name, which is returned.

    No mask is registered for the name, so transformers builds none: the function itself has to
    apply causality and windows.
    """
    name = f"{_NAME_PREFIX}{secrets.token_hex(8)}"
    ALL_ATTENTION_FUNCTIONS[name] = function
    return name


def set_attention(network: Any, function: AttentionFunction) -> None:
    """Replace the attention function of every layer. The function may refer to a cache, so it is
    unregistered when it is replaced or the network is deleted."""
    previous = network.config._attn_implementation
    name = register_attention(function)
    network.set_attn_implementation(name)
    weakref.finalize(network, _unregister, name).atexit = False
    _unregister(previous)


@contextmanager
def temporary_attention(network: Any, function: AttentionFunction) -> Iterator[None]:
    """Replace the attention function within the context."""
    previous, name = network.config._attn_implementation, register_attention(function)
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(previous)
        _unregister(name)


def _unregister(name: str) -> None:
    if name.startswith(_NAME_PREFIX):
        ALL_ATTENTION_FUNCTIONS.pop(name, None)


class LayerProbe:
    """An attention function that records the shape of every layer and returns zeros."""

    def __init__(self) -> None:
        self.layers: list[AttentionSpec] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise UnsupportedModelError(f"{type(module).__name__} requires an attention mask")
        if unused.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(module).__name__} attends to later tokens")
        heads, key_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
        sinks = s_aux is not None
        self.layers.append(AttentionSpec(heads, key_dim, value_dim, key.dtype, softcap, sinks))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

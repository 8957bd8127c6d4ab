"""Attention functions of transformers: registered, replaced, and one that probes a model.

transformers calls the function once per attention layer and forward pass, by a registered name. The
order of these calls, which is the same in every pass, identifies the layers.
"""

import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from worker_svc.cache.kv_pool import AttentionSpec
from worker_svc.model.served_model import AttentionFunction

_NAME_PREFIX: Final = "quire_"


class UnsupportedModelError(ValueError):
    """A model whose attention cannot be run on a paged cache."""


def register_attention(function: AttentionFunction) -> str:
    """Register `function` with transformers under a new name, which is returned. It is found by all
    families, those with a mapping of names of their own included.

    No mask is registered for the name, so transformers builds none: the function itself has to
    apply causality and windows.
    """
    name = f"{_NAME_PREFIX}{secrets.token_hex(8)}"
    AttentionInterface.register(name, function)
    return name


def register_probe(probe: "LayerProbe") -> str:
    """As `register_attention`, for a probe, to which the model hands the masks it wants."""
    name = register_attention(probe)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, probe.make_mask)
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
        # transformers has no call for this.
        AttentionInterface._global_mapping.pop(name, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


class LayerProbe:
    """An attention function that records the shape of every layer and returns zeros.

    What a layer's mask hides has to follow from the arguments of the call: when the model is
    served, there are no masks. Some models have a window in the mask alone, or in transformers'
    cache alone.
    """

    def __init__(self, max_model_len: int) -> None:
        self.layers: list[AttentionSpec] = []
        self._windows: set[int | None] = set()  # of all layers
        self._max_model_len = max_model_len
        # Windows and chunks show at the end of the longest sequence; its middle separates the two.
        self._queries = torch.tensor([max_model_len - 1, max_model_len // 2]).unsqueeze(1)
        self._keys = torch.arange(max_model_len)
        self._masks: list[tuple[Tensor, Tensor]] = []  # with the keys that the queries see

    def make_mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor],
        device: torch.device,
        **unused: object,
    ) -> Tensor:
        """A mask function of transformers, whose masks this probe recognises in its calls."""
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
        seen = mask_function(0, 0, self._queries.to(device), self._keys.to(device))
        self._masks.append((mask, seen.expand(2, len(self._keys)).cpu()))
        return mask

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        if unused.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(module).__name__} attends to later tokens")
        if unused.get("indices") is not None:
            # Of DeepSeek V3.2 and those after it, from keys of another cache.
            raise UnsupportedModelError(
                f"{type(module).__name__} selects the keys that it attends to (sparse attention)"
            )
        if attention_mask is not None:
            self._check_mask(type(module).__name__, attention_mask, sliding_window)
        self._windows.add(sliding_window)
        heads, key_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
        sinks = s_aux is not None
        self.layers.append(AttentionSpec(heads, key_dim, value_dim, key.dtype, softcap, sinks))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def check_cache(self, config: PretrainedConfig) -> None:
        """UnsupportedModelError if transformers' cache keeps a window that no layer has."""
        for layer in DynamicCache(config=config).layers:
            window: int | None = getattr(layer, "sliding_window", None)
            if window is None or window in self._windows:
                continue
            if window < self._max_model_len:
                raise _window_error("the model", window, "transformers' cache")

    def _check_mask(self, layer: str, mask: Tensor, window: int | None) -> None:
        """UnsupportedModelError if the mask hides other keys than causality and the window do."""
        seen = next((seen for known, seen in self._masks if _share_memory(known, mask)), None)
        if seen is None:
            raise UnsupportedModelError(f"{layer} requires an attention mask")
        if seen.equal(self._seen_through(window)):
            return
        masked = int(seen[0].sum())
        if not seen.equal(self._seen_through(masked)):
            raise UnsupportedModelError(f"{layer} requires an attention mask")
        raise _window_error(layer, masked, "its mask")

    def _seen_through(self, window: int | None) -> Tensor:
        distance = self._queries - self._keys
        return (distance >= 0) & (distance < (len(self._keys) if window is None else window))


def _window_error(layer: str, window: int, place: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{layer} has a sliding window of {window} tokens in {place} alone, which is not "
        f"served; a --max-model-len of at most {window} needs no window"
    )


def _share_memory(mask: Tensor, other: Tensor) -> bool:
    """Whether one is the other or a slice of it: Gemma 4 slices masks of layers that share keys."""
    return mask.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()

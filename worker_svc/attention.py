"""Paged attention as an attention function of transformers.

transformers calls one function per attention layer and forward pass, by a registered name. Layers
are told apart by the order of these calls, which is the same in every pass.
"""

import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import structlog
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.attention import PagedBatch, paged_attention
from kernels.choice import Implementation
from kernels.decoder import DecoderWeights, Ends, decoder_layers, decoder_pass
from kernels.flash import FlashAttention, FlashBatch, find_flash
from kernels.flash_choice import AttentionNeeds, choose_flash
from kernels.kv_write import kv_write
from worker_svc.kv_pool import LayerShape
from worker_svc.kv_scales import KvScales

log = structlog.get_logger()

_NAMES: Final = "quire_"  # so those of our functions begin

# transformers calls it with a module, then query, key and value as `[1, heads, num_tokens, dim]`.
AttentionFunction = Callable[..., tuple[Tensor, None]]


class UnsupportedModelError(ValueError):
    """A model whose attention cannot be run on a paged cache."""


def register_attention(function: AttentionFunction) -> str:
    """Makes `function` known to transformers under a new name, which it returns.

    No mask is registered for the name, so transformers builds none: causality and windows are the
    function's own business.
    """
    name = f"{_NAMES}{secrets.token_hex(8)}"
    ALL_ATTENTION_FUNCTIONS[name] = function
    return name


def attend_with(network: Any, function: AttentionFunction) -> None:
    """Replaces the attention function of every layer. It is forgotten with the network, or when it
    is replaced in its turn: it may have hold of a cache."""
    former = network.config._attn_implementation
    name = register_attention(function)
    network.set_attn_implementation(name)
    weakref.finalize(network, _forget, name).atexit = False
    _forget(former)


@contextmanager
def attending_with(network: Any, function: AttentionFunction) -> Iterator[None]:
    """As `attend_with`, for a while."""
    former, name = network.config._attn_implementation, register_attention(function)
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(former)
        _forget(name)


def _forget(name: str) -> None:
    if name.startswith(_NAMES):
        ALL_ATTENTION_FUNCTIONS.pop(name, None)


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
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            raise UnsupportedModelError(f"{type(module).__name__} insists on a mask of its own")
        if unused.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(f"{type(module).__name__} attends to later tokens")
        heads, key_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
        sinks = s_aux is not None
        self.layers.append(LayerShape(heads, key_dim, value_dim, key.dtype, softcap, sinks))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def choose_attention(
    layers: Sequence[LayerShape],
    cache_dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    setting: str,
    kernels: str = "auto",
) -> FlashAttention | None:
    """FlashAttention if it can serve these layers; says so, and why not. `setting` is one of
    `kernels.flash_choice.FLASH_SETTINGS`, `kernels` that of the other kernels. NoSuchKernel if
    the setting names what cannot serve."""
    on_gpu = device.type == "cuda"
    needs = AttentionNeeds(
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        dtype=layers[0].dtype,
        cache_dtype=cache_dtype,
        block_size=block_size,
        head_dims=frozenset((layer.key_dim, layer.value_dim) for layer in layers),
        has_softcap=any(layer.softcap is not None for layer in layers),
        has_sinks=any(layer.has_sinks for layer in layers),
        kernels=kernels,
    )
    # Elsewhere none is needed, and to import one takes time.
    found, missing = find_flash() if on_gpu else ({}, {})
    choice = choose_flash(needs, missing, setting)
    refused = {f"not_{kind.replace('-', '_')}": reason for kind, reason in choice.reasons.items()}
    log.info("attention", by=choice.kind or "paged", **refused)
    return None if choice.kind is None else found[choice.kind]


class PagedAttention:
    """Writes keys and values of a step into the pool, then attends through the block table."""

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor]],
        implementation: Implementation | None = None,
        scales: Sequence[KvScales] | None = None,
        flash: FlashAttention | None = None,
    ) -> None:
        """`implementation` is the one of both kernels; the best there is if absent. `scales` are
        those of the layers' caches, 1.0 if absent. `flash` attends in the kernel's place."""
        self._layers = layers
        self._implementation = implementation
        self._scales = scales or [KvScales()] * len(layers)
        self._flash = flash
        self._caches = [cache for pair in layers for cache in pair]
        self._cache_scales = [scale for one in self._scales for scale in (one.key, one.value)]
        self._batch: PagedBatch
        self._flash_batch: FlashBatch
        self._slot_mapping: Tensor
        self._next_layer = 0

    def begin(self, batch: PagedBatch, slot_mapping: Tensor) -> None:
        """To be called before each forward pass."""
        self._batch = batch
        self._slot_mapping = slot_mapping
        self._next_layer = 0

    def runs(self, layers: DecoderWeights) -> bool:
        """Whether these layers can run on the pool in one call."""
        alike = self._implementation == layers.implementation and self._flash is None
        return alike and layers.num_layers == len(self._layers)

    def run(self, layers: DecoderWeights, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """All layers of the forward pass, of states `[num_tokens, hidden_size]`."""
        return decoder_layers(
            states,
            cosines,
            sines,
            layers,
            self._caches,
            self._batch,
            self._slot_mapping,
            self._cache_scales,
        )

    def run_pass(
        self, layers: DecoderWeights, ends: Ends, ids: Tensor, positions: Tensor, kept: Tensor
    ) -> Tensor:
        """The whole forward pass: logits `[len(kept), vocab_size]`."""
        return decoder_pass(
            ids,
            positions,
            kept,
            ends,
            layers,
            self._caches,
            self._batch,
            self._slot_mapping,
            self._cache_scales,
        )

    def __call__(
        self,
        module: nn.Module | None,
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
        layer = self._next_layer
        self._next_layer += 1
        k_cache, v_cache = self._layers[layer]
        scales = self._scales[layer]
        query, key, value = _flat(query), _flat(key), _flat(value)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        kv_write(
            key,
            value,
            k_cache,
            v_cache,
            self._slot_mapping,
            k_scale=scales.key,
            v_scale=scales.value,
            implementation=self._implementation,
        )
        if self._flash is not None:
            out = self._flash_attention(self._flash, layer, query, scale, sliding_window, softcap)
            return out.unsqueeze(0), None
        out = paged_attention(
            query,
            k_cache,
            v_cache,
            self._batch,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            k_scale=scales.key,
            v_scale=scales.value,
            implementation=self._implementation,
        )
        return out.unsqueeze(0), None

    def _flash_attention(
        self,
        flash: FlashAttention,
        layer: int,
        query: Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        if layer == 0:
            # Here and not in `begin`: a graph that is captured has to compute it anew.
            self._flash_batch = FlashBatch.of(self._batch)
        return flash(
            query,
            *self._layers[layer],
            self._flash_batch,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )


def _flat(states: Tensor) -> Tensor:
    """`[1, heads, num_tokens, dim]` to `[num_tokens, heads, dim]`."""
    return states.squeeze(0).transpose(0, 1)

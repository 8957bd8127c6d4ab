"""Attention over the paged cache, as an attention function of transformers and in one call with all
layers."""

from collections.abc import Sequence
from functools import cached_property

import structlog
import torch
from torch import Tensor, nn

from kernels.attention import PagedBatch, paged_attention
from kernels.decoder import (
    DecoderCaches,
    DecoderWeights,
    EmbeddingAndHead,
    decoder_forward,
    decoder_layers,
)
from kernels.dispatch import Implementation, NoSuchKernel
from kernels.exchange import Exchange
from kernels.flash import FlashAttention, FlashBatch, find_flash
from kernels.flash_dispatch import AttentionNeeds, choose_flash
from kernels.kv_write import kv_write
from worker_svc.cache.kv_pool import AttentionSpec
from worker_svc.cache.kv_scales import KvScales
from worker_svc.errors import WrongSettingError

log = structlog.get_logger()


def choose_attention(
    layers: Sequence[AttentionSpec],
    cache_dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    setting: str,
    kernels: str = "auto",
) -> FlashAttention | None:
    """FlashAttention if it supports these layers; logs the choice and the reasons. `setting` is one
    of `kernels.flash_dispatch.FLASH_SETTINGS`, `kernels` the setting of all other kernels.
    WrongSettingError if the setting names a library that does not support them."""
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
    # A CPU does not need the library, whose import takes time.
    found, missing = find_flash() if on_gpu else ({}, {})
    try:
        choice = choose_flash(needs, missing, setting)
    except NoSuchKernel as error:
        raise WrongSettingError(f"--attention: {error}") from error
    refused = {f"not_{kind.replace('-', '_')}": reason for kind, reason in choice.reasons.items()}
    log.info("attention", by=choice.kind or "paged", **refused)
    return None if choice.kind is None else found[choice.kind]


class PagedAttention:
    """Writes keys and values of a step into the pool, then attends by the block table."""

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor]],
        implementation: Implementation,
        scales: Sequence[KvScales] | None = None,
        flash: FlashAttention | None = None,
    ) -> None:
        """`implementation` is that of both kernels. `scales` are those of the layers' caches; the
        default is 1.0. `flash` replaces the kernel."""
        self._layers = layers
        self._implementation = implementation
        self._scales = scales or [KvScales()] * len(layers)
        self._flash = flash
        self._batch: PagedBatch
        self._flash_batch: FlashBatch
        self._slot_mapping: Tensor
        self._next_layer = 0

    def set_batch(self, batch: PagedBatch, slot_mapping: Tensor) -> None:
        """To be called before each forward pass."""
        self._batch = batch
        self._slot_mapping = slot_mapping
        self._next_layer = 0

    @property
    def batch(self) -> tuple[PagedBatch, Tensor]:
        """What `set_batch` was called with."""
        return self._batch, self._slot_mapping

    def can_run(self, layers: DecoderWeights) -> bool:
        """Whether these layers can run on the pool in one call."""
        alike = self._implementation == layers.implementation and self._flash is None
        return alike and layers.num_layers == len(self._layers)

    def run_layers(
        self,
        layers: DecoderWeights,
        hidden_states: Tensor,
        cosines: Tensor,
        sines: Tensor,
        exchange: Exchange | None = None,
    ) -> Tensor:
        """All layers of the forward pass, from hidden states `[num_tokens, hidden_size]`. With an
        `exchange` they are a shard."""
        cache = (self._caches, self._batch, self._slot_mapping)
        return decoder_layers(hidden_states, cosines, sines, layers, *cache, exchange)

    def run_forward(
        self,
        layers: DecoderWeights,
        embedding_and_head: EmbeddingAndHead,
        ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        exchange: Exchange | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The whole forward pass: float32 logits `[len(logits_indices), vocab_size]`, in `out` if
        given. With an `exchange` they are those of a shard."""
        cache = (self._caches, self._batch, self._slot_mapping)
        inputs = (ids, positions, logits_indices)
        return decoder_forward(*inputs, embedding_and_head, layers, *cache, exchange, out)

    @cached_property
    def _caches(self) -> DecoderCaches:
        return DecoderCaches(
            [cache for pair in self._layers for cache in pair],
            [scale for one in self._scales for scale in (one.key, one.value)],
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
            if layer == 0:
                # Here and not in `set_batch`: a captured graph has to compute it.
                self._flash_batch = FlashBatch.of(self._batch)
            out = self._flash(
                query,
                k_cache,
                v_cache,
                self._flash_batch,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
            )
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


def _flat(states: Tensor) -> Tensor:
    """`[1, heads, num_tokens, dim]` to `[num_tokens, heads, dim]`."""
    return states.squeeze(0).transpose(0, 1)

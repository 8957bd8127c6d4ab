"""Determines the dtype, the size and the scales of the cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch

from kernels.dispatch import Implementation
from kernels.flash import FlashAttention
from worker_svc.cache.kv_pool import (
    AttentionSpecs,
    block_bytes_of,
    dtype_name,
    size_pool,
    with_cache_dtype,
)
from worker_svc.cache.kv_scales import KvMaxima, KvScales, read_scales, scales_of_maxima
from worker_svc.cache.pool_size import (
    DeviceMemory,
    PoolSize,
    bytes_allocated_later,
    cache_memory,
    require_host_memory,
)
from worker_svc.cache.profiling import ProfileBatch, ProfileRun, largest_batch, measure, run_batch
from worker_svc.errors import WrongSettingError
from worker_svc.gpu.device_memory import MemoryMeter
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.staging import largest_step_bytes
from worker_svc.logits.penalties import largest_counts_bytes
from worker_svc.model.served_model import ServedModel
from worker_svc.service.process import host_memory, num_local_ranks
from worker_svc.settings import WorkerSettings

log = structlog.get_logger()

# Enough tokens to contain large keys and values, few enough to be fast on a CPU. Whatever a step of
# the worker may have: so workers that replace each other round alike.
_SCALE_TOKENS, _SCALE_ROWS = 512, 4

# The largest keys and values of all ranks that have heads of the same layers, by those of this one.
OfAllRanks = Callable[[tuple[KvMaxima, ...]], tuple[KvMaxima, ...]]


@dataclass(frozen=True)
class CachedLayers:
    """What a model caches."""

    layers: AttentionSpecs  # with the dtype of the cache
    scales: tuple[KvScales, ...]  # per layer


@dataclass(frozen=True)
class CacheSetup:
    """Parameters of the pool and of the attention over it."""

    layers: AttentionSpecs  # with the dtype of the cache; those of a draft model come last
    size: PoolSize
    scales: tuple[KvScales, ...]  # per layer


def cached_layers(
    model: ServedModel,
    settings: WorkerSettings,
    implementation: Implementation,
    of_all_ranks: OfAllRanks = tuple,
) -> CachedLayers:
    """Those of a model on a CPU. Runs a small batch if scales are needed that the checkpoint lacks;
    afterwards the model's attention function must be replaced."""
    layers = with_cache_dtype(model.layers, settings.kv_cache_dtype)
    scales = _known_scales(model, layers[0].dtype)
    if scales is None:
        small = _batch(model, settings, _SCALE_TOKENS, _SCALE_ROWS)
        run = run_batch(model, small, implementation, None, sampling=False)
        scales = _profiled_scales(of_all_ranks(run.maxima), layers[0].dtype)
    return CachedLayers(layers, scales)


def set_up_cache(
    model: ServedModel,
    settings: WorkerSettings,
    implementation: Implementation,
    flash: FlashAttention | None,
    meter: MemoryMeter | None,
    draft: CachedLayers | None = None,
    of_all_ranks: OfAllRanks = tuple,
) -> CacheSetup:
    """Run the largest batch if there is a meter to measure its memory, or a small one if scales
    are needed that the checkpoint lacks. Afterwards the model's attention function must be
    replaced. A block has the keys and values of the `draft` model as well.

    WrongSettingError, with both numbers, if the requested cache does not fit.
    """
    if meter is None:
        memory, cached = None, cached_layers(model, settings, implementation, of_all_ranks)
    else:
        memory, cached = _measured_layers(
            model, settings, implementation, flash, meter, of_all_ranks
        )
    layers, scales = cached.layers, cached.scales
    if draft is not None:
        layers, scales = layers + draft.layers, scales + draft.scales
    return CacheSetup(layers, _size(model, layers, settings, memory), scales)


def _measured_layers(
    model: ServedModel,
    settings: WorkerSettings,
    implementation: Implementation,
    flash: FlashAttention | None,
    meter: MemoryMeter,
    of_all_ranks: OfAllRanks,
) -> tuple[DeviceMemory, CachedLayers]:
    """`cached_layers`, with the memory that the largest batch needs."""
    layers = with_cache_dtype(model.layers, settings.kv_cache_dtype)
    scales = _known_scales(model, layers[0].dtype)
    largest = _batch(model, settings, settings.max_num_batched_tokens, settings.max_num_seqs)
    run, memory = _profile(model, largest, implementation, flash, meter)
    later = _allocated_later(model, settings, memory.peak_activations)
    if scales is None:
        scales = _profiled_scales(of_all_ranks(run.maxima), layers[0].dtype)
    return replace(memory, allocated_later=later), CachedLayers(layers, scales)


def _known_scales(model: ServedModel, dtype: torch.dtype) -> tuple[KvScales, ...] | None:
    """1.0 for a cache of 16 or 32 bits, else the checkpoint's, or None if it has none."""
    if dtype.itemsize > 1:
        return (KvScales(),) * len(model.layers)
    first, num_own = model.num_earlier_layers, len(model.layers)
    # Either all stages use those of the checkpoint, or all make the run that finds others.
    scales = read_scales(model.weights, first + num_own + model.num_later_layers)
    if scales is None:
        return None
    own = scales[first : first + num_own]
    _log_scales(own, dtype, "the checkpoint")
    return own


def _profiled_scales(maxima: tuple[KvMaxima, ...], dtype: torch.dtype) -> tuple[KvScales, ...]:
    scales = scales_of_maxima(maxima, dtype)
    _log_scales(scales, dtype, "a run over random tokens")
    return scales


def _log_scales(scales: tuple[KvScales, ...], dtype: torch.dtype, source: str) -> None:
    keys, values = [scale.key for scale in scales], [scale.value for scale in scales]
    log.info(
        "scales of the cache",
        source=source,
        dtype=dtype_name(dtype),
        keys=[min(keys), max(keys)],
        values=[min(values), max(values)],
    )


def _batch(
    model: ServedModel, settings: WorkerSettings, num_tokens: int, num_rows: int
) -> ProfileBatch:
    return largest_batch(
        num_tokens, num_rows, model.max_model_len, settings.block_size, model.vocab_size
    )


def _allocated_later(model: ServedModel, settings: WorkerSettings, peak_activations: int) -> int:
    num_rows, num_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    width = -(-model.max_model_len // settings.block_size)
    vocab_size = model.vocab_size
    of_tables = (
        (num_rows + 1) * width * 4
        + largest_step_bytes(num_rows, num_tokens, width)
        + largest_counts_bytes(num_rows, vocab_size)
    )
    return bytes_allocated_later(
        peak_activations,
        num_tokens,
        () if settings.enforce_eager else graph_sizes(num_rows),
        vocab_size,
        of_tables,
        2 * len(model.layers),
    )


def _profile(
    model: ServedModel,
    batch: ProfileBatch,
    implementation: Implementation,
    flash: FlashAttention | None,
    meter: MemoryMeter,
) -> tuple[ProfileRun, DeviceMemory]:
    try:
        return measure(meter, partial(run_batch, model, batch, implementation, flash))
    except torch.OutOfMemoryError as error:
        raise WrongSettingError(
            f"the largest batch, {batch.inputs.num_tokens} tokens in {batch.inputs.num_requests} "
            "rows, does not fit beside the weights; lower --max-num-batched-tokens or "
            f"--max-num-seqs: {error}"
        ) from error


def _size(
    model: ServedModel,
    layers: AttentionSpecs,
    settings: WorkerSettings,
    memory: DeviceMemory | None,
) -> PoolSize:
    requested = settings.kv_cache_memory
    if settings.num_blocks is not None:
        requested = settings.num_blocks * block_bytes_of(layers, settings.block_size)
    if memory is not None:
        log.info(
            "memory of the GPU",
            **vars(memory),
            gpu_memory_utilization=settings.gpu_memory_utilization,
        )
    num_bytes = cache_memory(requested, settings.gpu_memory_utilization, memory)
    require_host_memory(
        num_bytes if memory is None else 0,
        settings.swap_space,
        host_memory(),
        num_local_ranks(settings.num_ranks),
    )
    return size_pool(
        layers,
        settings.block_size,
        model.max_model_len,
        num_bytes,
        settings.num_blocks,
        settings.swap_space,
    )

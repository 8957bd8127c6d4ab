"""Loads a checkpoint by transformers and replaces parts of the model by kernels. Imported when that
is needed: transformers takes seconds to import."""

import gc
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from kernels.dispatch import Implementation, NoSuchKernel, choose
from kernels.flash import FlashAttention
from worker_svc.cache.kv_pool import with_cache_dtype
from worker_svc.errors import WrongSettingError
from worker_svc.model.decoder_layers import fuse_layers
from worker_svc.model.device.device_layers import fuse_device_layers
from worker_svc.model.elementwise_fusion import fuse, has_kernels
from worker_svc.model.fused_forward import fuse_forward
from worker_svc.model.kernel_build import announce_compilation
from worker_svc.model.layer_calls import record_layer_calls
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.loading import LoadedModel, load_model
from worker_svc.model.paged_attention import choose_attention
from worker_svc.model.quantized.packing import (
    multiplies_integers,
    pack_quantized,
    restore_weights,
)
from worker_svc.model.quantized.sources import rounded_weights
from worker_svc.model.served_model import ServedModel
from worker_svc.model.shards.sharded_model import ShardedModel
from worker_svc.model.shards.sums import sum_over_ranks
from worker_svc.model.stages.joining import join_stage
from worker_svc.model.stages.stage import Stage
from worker_svc.model.stages.staged_model import StagedModel
from worker_svc.model.weight_packing import pack
from worker_svc.model.weight_readers import ProbedWeights, has_finite_logits, probe_weights
from worker_svc.packed.capture import packed_network
from worker_svc.packed.packed_model import PackedNetwork
from worker_svc.ranks.group import RankGroup
from worker_svc.settings import WorkerSettings

log = structlog.get_logger()


@dataclass(frozen=True)
class PreparedModel:
    """A model whose weights are in their final form, and how it is run."""

    model: ServedModel
    implementation: Implementation
    flash: FlashAttention | None
    packed: PackedNetwork | None  # if the model consists of packed weights alone


def prepare_model(
    settings: WorkerSettings,
    device: torch.device,
    progress: LoadProgress,
    ranks: RankGroup | None = None,
) -> PreparedModel:
    """Load the model, choose its kernels and give it its weights. With `ranks` this process has a
    shard of it. ModelError and WrongSettingError as in `load_model`."""
    if not sys.stderr.isatty():
        # Progress bars would garble the log.
        disable_progress_bars()
        disable_progress_bar()
    model = _load_model(settings, device, progress, ranks)
    implementation = _implementation(model, settings.kv_cache_dtype, settings.kernels, progress)
    if settings.enable_torch_compile:
        _check_compiling(model, settings, implementation)
    flash = choose_attention(
        model.layers,
        with_cache_dtype(model.layers, settings.kv_cache_dtype)[0].dtype,
        settings.block_size,
        device,
        settings.attention,
        settings.kernels,
    )
    # torch's compiler fuses the same operations, and is to see them all.
    replacing = Implementation.TORCH if settings.enable_torch_compile else implementation
    replaced = _replace_parts(model, settings.quantization, replacing, progress)
    if replaced is None:
        log.warning("packed weights give logits that are not finite: the model keeps its own")
        del model
        gc.collect()  # Parts of the model refer to each other.
        model = _load_model(settings, device, progress, ranks)
        replaced = _quantize(model, settings.quantization, Implementation.TORCH, progress)
    log.info("kernels", implementation=implementation, **replaced)
    if ranks is None:
        return PreparedModel(model, implementation, flash, packed_network(model))
    return PreparedModel(_joined(model, ranks, settings), implementation, flash, None)


def _joined(model: LoadedModel, ranks: RankGroup, settings: WorkerSettings) -> ServedModel:
    """The part of this process with what it gets from the other ranks."""
    if ranks.of_stage.size > 1:
        sum_over_ranks(model.network, ranks.of_stage)
    stage = _stage(ranks, settings)
    if stage is None:
        return ShardedModel(model, ranks)
    return StagedModel(model, stage, join_stage(model.network, stage), ranks)


def _stage(ranks: RankGroup, settings: WorkerSettings) -> Stage | None:
    if ranks.num_stages == 1:
        return None
    return Stage(ranks.stage, ranks.num_stages, settings.layers_of_stages)


def _check_compiling(
    model: LoadedModel, settings: WorkerSettings, implementation: Implementation
) -> None:
    """WrongSettingError if kernels replace what torch would compile."""
    if implementation.is_cpp:
        raise WrongSettingError(
            f"--enable-torch-compile: the kernels {implementation} replace what it would compile; "
            "set --kernels=torch or leave it out"
        )
    is_quantized = model.quantized or settings.quantization is not None
    if is_quantized and multiplies_integers(implementation):
        raise WrongSettingError(
            "--enable-torch-compile: torch does not compile the products of quantised weights; "
            "leave it out, or set --kernels=torch, which multiplies weights of 16 bits"
        )


def _load_model(
    settings: WorkerSettings, device: torch.device, progress: LoadProgress, ranks: RankGroup | None
) -> LoadedModel:
    assert settings.model is not None
    return load_model(
        settings.model,
        settings.revision,
        settings.dtype,
        device,
        settings.max_model_len,
        progress,
        settings.quantization,
        settings.int8_activations,
        None if ranks is None else replace(ranks.shard, stage=_stage(ranks, settings)),
    )


def _quantize(
    model: LoadedModel,
    quantization: str | None,
    implementation: Implementation,
    progress: LoadProgress,
) -> Counter[str]:
    """Give the model its quantised weights; return counts."""
    sources = model.quantized
    if quantization is not None:
        kept = probe_weights(model.network).read_elsewhere
        sources = rounded_weights(model.network, quantization, kept)
    packed = pack_quantized(model.network, sources, implementation, progress, model.weights)
    sources.clear()
    return packed


def _replace_parts(
    model: LoadedModel,
    quantization: str | None,
    implementation: Implementation,
    progress: LoadProgress,
) -> Counter[str] | None:
    """Replace parts of the model by faster ones; return counts. None if it has no finite logits
    any more: some code reads a weight in a way that the probe did not show."""
    network = model.network
    quantized = _quantize(model, quantization, implementation, progress)
    if not has_kernels(implementation):
        return quantized
    if not implementation.is_cpp:
        return _replace_on_device(network, quantized, implementation)
    probed = _probe_and_restore(network, quantized)
    calls = record_layer_calls(network, implementation)
    replaced = fuse(network, implementation)
    replaced += pack(network, implementation, probed.read_elsewhere, progress, model.weights)
    replaced += fuse_layers(calls) + fuse_forward(network, model.max_model_len)
    if probed.is_finite and not has_finite_logits(network):
        return None
    return quantized + replaced


def _replace_on_device(
    network: Any, quantized: Counter[str], implementation: Implementation
) -> Counter[str] | None:
    """As `_replace_parts`, by Triton's kernels: weights of 16 and 32 bits stay as they are."""
    if quantized and not _probe_and_restore(network, quantized).is_finite:
        return None
    calls = record_layer_calls(network, implementation)
    replaced = fuse(network, implementation)
    return quantized + replaced + fuse_device_layers(network, calls, implementation)


def _probe_and_restore(network: Any, quantized: Counter[str]) -> ProbedWeights:
    """What reads the weights, after quantised ones that other code reads were restored, which are
    then among the counts."""
    probed = probe_weights(network)
    if restored := restore_weights(probed.read_elsewhere):
        quantized["restored weights"] = restored
        probed = probe_weights(network)
    return probed


def _implementation(
    model: LoadedModel, kv_cache_dtype: str, setting: str, progress: LoadProgress
) -> Implementation:
    """WrongSettingError if the setting names kernels that cannot serve the model."""
    announce_compilation(setting, model.device, progress)
    cached = with_cache_dtype(model.layers, kv_cache_dtype)
    if cached[0].dtype == torch.float8_e4m3fn and model.device.type == "cuda":
        require_e4m3(torch.cuda.get_device_capability(model.device))
    dtypes = {model.dtype, *(layer.dtype for layer in (*model.layers, *cached))}
    try:
        return choose(model.device.type, dtypes, setting)
    except NoSuchKernel as error:
        raise WrongSettingError(f"--kernels: {error}") from error


def require_e4m3(capability: tuple[int, int]) -> None:
    if capability < (8, 9):
        raise WrongSettingError(
            "--kv-cache-dtype: fp8_e4m3 needs a GPU of compute capability 8.9, this one has "
            f"{'.'.join(map(str, capability))}; fp8_e5m2 does not"
        )

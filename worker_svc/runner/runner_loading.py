"""Loads a model, sizes its cache, and starts its runner."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

import structlog
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from kernels.cpu.extension import is_compiled
from kernels.dispatch import Implementation, NoSuchKernel, choose
from worker_svc.cache.cache_setup import set_up_cache
from worker_svc.cache.kv_pool import KvPool, dtype_name, with_cache_dtype
from worker_svc.gpu.device_memory import CudaMeter
from worker_svc.gpu.gpu_lock import exclusive_lock
from worker_svc.grammar.compiler import find_grammars
from worker_svc.logits.entry_points import load_processors
from worker_svc.model.attention import PagedAttention, choose_attention
from worker_svc.model.decoder_layers import fuse_layers, record_layer_calls
from worker_svc.model.elementwise_fusion import fuse
from worker_svc.model.fused_forward import fuse_forward
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.loading import LoadedModel, find_device, load_model
from worker_svc.model.quantized.packing import pack_quantized, restore_weights
from worker_svc.model.quantized.sources import rounded_weights
from worker_svc.model.torch_compile import compile_model
from worker_svc.model.weight_packing import pack
from worker_svc.model.weight_readers import has_finite_logits, probe_weights
from worker_svc.plan.tables import RowTables
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.startup import start_runner
from worker_svc.runner.step_runner import Identity, LoadedRunner, no_op
from worker_svc.service.process import keep_freed_memory, return_freed_memory
from worker_svc.settings import WorkerSettings, WrongSettingError

log = structlog.get_logger()


def load_runner(settings: WorkerSettings) -> LoadedRunner:
    """Load the model and allocate its pool, which takes seconds to minutes. To be called on the
    thread that runs the plans: torch has a pool of threads per calling thread.

    ModelError and WrongSettingError as in `load_model` and `set_up_cache`.
    """
    if settings.model is None:
        raise WrongSettingError("--model / QUIRE_WORKER_MODEL: required to run a model")
    if not sys.stderr.isatty():
        # Progress bars would garble the log.
        disable_progress_bars()
        disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = find_device(settings.device)
    if device.type != "cuda":
        return _load(settings, device)
    with exclusive_lock(_lock_file(settings.gpu_locks, device)), convert_out_of_memory():
        return _load(settings, device)


def _lock_file(folder: Path | None, device: torch.device) -> Path:
    """One file per GPU, whatever its index in this process."""
    gpu = torch.cuda.get_device_properties(device).uuid
    return (folder or Path(gettempdir())) / f"quire-gpu-{gpu}.lock"


@contextmanager
def convert_out_of_memory() -> Iterator[None]:
    """Raise WrongSettingError in place of torch.OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise WrongSettingError(
            "the GPU does not hold the model, its cache and a step; lower "
            "--gpu-memory-utilization, --kv-cache-memory, --max-num-batched-tokens or "
            f"--max-num-seqs: {error}"
        ) from error


def _load(settings: WorkerSettings, device: torch.device) -> LoadedRunner:
    own_processors = load_processors(settings.logits_processors)
    progress = _progress(settings)
    model = _load_model(settings, device, progress)
    implementation = _implementation(model, settings.kv_cache_dtype, settings.kernels, progress)
    if settings.enable_torch_compile and implementation.is_cpp:
        raise WrongSettingError(
            f"--enable-torch-compile: the kernels {implementation} replace what it would compile; "
            "set --kernels=torch or leave it out"
        )
    flash = choose_attention(
        model.layers,
        with_cache_dtype(model.layers, settings.kv_cache_dtype)[0].dtype,
        settings.block_size,
        device,
        settings.attention,
        settings.kernels,
    )
    replaced = _replace_parts(model, settings.quantization, implementation, progress)
    if replaced is None:
        log.warning("packed weights give logits that are not finite: the model keeps its own")
        del model
        model = _load_model(settings, device, progress)
        replaced = _quantize(model, settings.quantization, Implementation.TORCH, progress)
    log.info("kernels", implementation=implementation, **replaced)
    # Packing has freed buffers, which would count beside the cache.
    return_freed_memory()
    progress.begin("allocating the cache")
    meter = CudaMeter(device) if device.type == "cuda" else None
    cache = set_up_cache(model, settings, implementation, flash, meter)
    pool = KvPool(cache.layers, cache.size, settings.block_size, device)
    attention = PagedAttention(pool.layers, implementation, cache.scales, flash)
    if settings.enable_torch_compile:
        compile_model(model, attention, settings.block_size)
    else:
        model.set_attention(attention)
    keep_freed_memory()
    tables = RowTables(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=model.max_model_len,
        block_size=settings.block_size,
        num_blocks=pool.size.num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    grammars = find_grammars(model.weights[0].parent, model.vocab_size)
    progress.begin("warming up")
    runner = start_runner(
        model,
        pool,
        attention,
        tables,
        implementation,
        enforce_eager=settings.enforce_eager,
        grammars=grammars,
        own_processors=own_processors,
    )
    identity = _identity(model, settings, pool)
    progress.end()
    on_arrival = no_op if grammars is None else grammars.prepare_for
    return LoadedRunner(MultiStepRunner(runner), identity, on_arrival)


def _progress(settings: WorkerSettings) -> LoadProgress:
    """A launcher that reads the file shows the progress itself."""
    shown = sys.stderr.isatty() and settings.progress_file is None
    return LoadProgress(settings.progress_file, terminal=sys.stderr if shown else None)


def _identity(model: LoadedModel, settings: WorkerSettings, pool: KvPool) -> Identity:
    return Identity(
        model_fingerprint=model.fingerprint,
        block_size=settings.block_size,
        num_blocks=pool.size.num_blocks,
        num_host_blocks=pool.size.num_host_blocks,
        kv_cache_dtype=dtype_name(pool.dtype),
        max_num_seqs=settings.max_num_seqs,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def _load_model(
    settings: WorkerSettings, device: torch.device, progress: LoadProgress
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
    if not implementation.is_cpp:
        return quantized + fuse(network, implementation)
    probed = probe_weights(network)
    if restored := restore_weights(probed.read_elsewhere):
        quantized["restored weights"] = restored
        probed = probe_weights(network)
    calls = record_layer_calls(network, implementation)
    replaced = fuse(network, implementation)
    replaced += pack(network, implementation, probed.read_elsewhere, progress, model.weights)
    replaced += fuse_layers(calls) + fuse_forward(network, model.max_model_len)
    if probed.is_finite and not has_finite_logits(network):
        return None
    return quantized + replaced


def _implementation(
    model: LoadedModel, kv_cache_dtype: str, setting: str, progress: LoadProgress
) -> Implementation:
    """WrongSettingError if the setting names kernels that cannot serve the model."""
    wants_cpp = setting == "auto" or setting.startswith("cpp")
    if wants_cpp and model.device.type == "cpu" and not is_compiled():
        progress.begin("compiling kernels, which takes about a minute")
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

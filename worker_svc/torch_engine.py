"""A loaded model with its pool and tables, ready to run plans."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

import structlog
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from kernels.choice import Implementation, NoSuchKernel, choose
from kernels.cpu.extension import is_compiled
from kernels.flash import FlashAttention
from worker_svc.attention import PagedAttention, choose_attention
from worker_svc.cache_setup import set_up_cache
from worker_svc.compiling import compile_model
from worker_svc.decoder_layers import join_layers, layer_examples
from worker_svc.device_memory import CudaMeter
from worker_svc.engine import Engine, Identity
from worker_svc.fusing import fuse
from worker_svc.kv_pool import KvPool, cached_as, dtype_name
from worker_svc.memory import keep_freed_memory
from worker_svc.model import LoadedModel, find_device, load_model
from worker_svc.packing import pack
from worker_svc.rounds import RoundsRunner
from worker_svc.runners import start_runner
from worker_svc.settings import WorkerSettings, WrongSettingError
from worker_svc.short_pass import shorten
from worker_svc.tables import Tables
from worker_svc.turns import one_at_a_time

log = structlog.get_logger()


def load_engine(settings: WorkerSettings) -> Engine:
    """Loads the model and allocates its pool; takes seconds to minutes. To be called on the thread
    that runs the plans: torch counts its threads per caller.

    ModelError and WrongSettingError as `load_model` and `set_up_cache` say.
    """
    if settings.model is None:
        raise WrongSettingError("--model / QUIRE_WORKER_MODEL: required to run a model")
    if not sys.stderr.isatty():
        # Progress bars are no log records.
        disable_progress_bars()
        disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = find_device(settings.device)
    if device.type != "cuda":
        return _load(settings, device)
    with one_at_a_time(_lock_file(settings.gpu_locks, device)), enough_memory():
        return _load(settings, device)


def _lock_file(folder: Path | None, device: torch.device) -> Path:
    """One per GPU, whatever its number is in this process."""
    gpu = torch.cuda.get_device_properties(device).uuid
    return (folder or Path(gettempdir())) / f"quire-gpu-{gpu}.lock"


@contextmanager
def enough_memory() -> Iterator[None]:
    """WrongSettingError where a GPU's is not enough."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise WrongSettingError(
            "the GPU does not hold the model, its cache and a step; lower "
            "--gpu-memory-utilization, --kv-cache-memory, --max-num-batched-tokens or "
            f"--max-num-seqs: {error}"
        ) from error


def _load(settings: WorkerSettings, device: torch.device) -> Engine:
    assert settings.model is not None
    model = load_model(
        settings.model, settings.revision, settings.dtype, device, settings.max_model_len
    )
    implementation = _implementation(model, settings.kv_cache_dtype, settings.kernels)
    if settings.enable_torch_compile and implementation.is_cpp:
        raise WrongSettingError(
            f"--enable-torch-compile: with the kernels {implementation} there is nothing left to "
            "compile; set --kernels=torch, or do without it"
        )
    flash = _flash(model, settings)
    examples = layer_examples(model.network, implementation)
    exchanged = fuse(model.network, implementation) + pack(model.network, implementation)
    exchanged += join_layers(examples) + shorten(model.network, model.max_model_len)
    log.info("kernels", implementation=implementation, **exchanged)
    meter = CudaMeter(device) if device.type == "cuda" else None
    cache = set_up_cache(model, settings, implementation, flash, meter)
    pool = KvPool(cache.layers, cache.size, settings.block_size, device)
    attention = PagedAttention(pool.layers, implementation, cache.scales, flash)
    if settings.enable_torch_compile:
        compile_model(model, attention, settings.block_size)
    else:
        model.attend_with(attention)
    keep_freed_memory()
    tables = Tables(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=model.max_model_len,
        block_size=settings.block_size,
        num_blocks=pool.size.num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    return Engine(
        RoundsRunner(
            start_runner(
                model,
                pool,
                attention,
                tables,
                implementation,
                enforce_eager=settings.enforce_eager,
            )
        ),
        Identity(
            model_fingerprint=model.fingerprint,
            block_size=settings.block_size,
            num_blocks=pool.size.num_blocks,
            num_host_blocks=pool.size.num_host_blocks,
            kv_cache_dtype=dtype_name(pool.dtype),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        ),
    )


def _implementation(model: LoadedModel, kv_cache_dtype: str, setting: str) -> Implementation:
    """WrongSettingError if the setting names what cannot serve."""
    wants_cpp = setting not in (
        Implementation.REFERENCE,
        Implementation.TORCH,
        Implementation.TRITON,
    )
    if wants_cpp and model.device.type == "cpu" and not is_compiled():
        log.info("compiling kernels, which takes about a minute")
    cached = cached_as(model.layers, kv_cache_dtype)
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


def _flash(model: LoadedModel, settings: WorkerSettings) -> FlashAttention | None:
    """WrongSettingError if the setting names what cannot serve."""
    cache_dtype = cached_as(model.layers, settings.kv_cache_dtype)[0].dtype
    try:
        return choose_attention(
            model.layers,
            cache_dtype,
            settings.block_size,
            model.device,
            settings.attention,
            settings.kernels,
        )
    except NoSuchKernel as error:
        raise WrongSettingError(f"--attention: {error}") from error

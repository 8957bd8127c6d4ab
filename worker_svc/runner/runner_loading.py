"""Loads a model, sizes its cache, and starts its runner."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir

import torch

from kernels.dispatch import HAS_TRITON, Implementation
from kernels.flash import FlashAttention
from worker_svc.cache.cache_setup import set_up_cache
from worker_svc.cache.kv_pool import KvPool, dtype_name
from worker_svc.gpu.device_memory import CudaMeter
from worker_svc.gpu.gpu_lock import exclusive_lock
from worker_svc.grammar.compiler import find_grammars
from worker_svc.logits.entry_points import load_processors
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.packed.model_cache import ModelCache
from worker_svc.plan.tables import RowTables
from worker_svc.runner.devices import find_device
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.startup import start_runner
from worker_svc.runner.step_runner import Identity, LoadedRunner, no_op
from worker_svc.service.process import block_import, keep_freed_memory, return_freed_memory
from worker_svc.settings import WorkerSettings, WrongSettingError


def load_runner(settings: WorkerSettings) -> LoadedRunner:
    """Load the model and allocate its pool, which takes seconds to minutes. To be called on the
    thread that runs the plans: torch has a pool of threads per calling thread.

    ModelError and WrongSettingError as in `load_model` and `set_up_cache`.
    """
    if settings.model is None:
        raise WrongSettingError("--model / QUIRE_WORKER_MODEL: required to run a model")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = find_device(settings.device)
    require_speculation(settings, device)
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


def require_speculation(settings: WorkerSettings, device: torch.device) -> None:
    """WrongSettingError if the device cannot speculate as the settings say."""
    if settings.num_speculative_tokens and device.type == "cuda":
        raise WrongSettingError(
            "--num-speculative-tokens / QUIRE_WORKER_NUM_SPECULATIVE_TOKENS: not on a GPU, whose "
            "steps are launched before the tokens of earlier ones are known; leave it at 0"
        )


def _load(settings: WorkerSettings, device: torch.device) -> LoadedRunner:
    own_processors = load_processors(settings.logits_processors)
    progress = _progress(settings)
    source = _load_model(settings, device, progress)
    model, implementation = source.model, source.implementation
    # Packing has freed buffers, which would count beside the cache.
    return_freed_memory()
    progress.begin("allocating the cache")
    meter = CudaMeter(device) if device.type == "cuda" else None
    cache = set_up_cache(model, settings, implementation, source.flash, meter)
    with ThreadPoolExecutor(1, "vocabulary") as thread:
        # It holds the interpreter for a second, in which no row could be served. Zeroing the pool
        # does not need the interpreter.
        reading = thread.submit(find_grammars, model.weights[0].parent, model.vocab_size)
        pool = KvPool(cache.layers, cache.size, settings.block_size, device)
        grammars = reading.result()
    attention = PagedAttention(pool.layers, implementation, cache.scales, source.flash)
    if settings.enable_torch_compile:
        compiling = import_module("worker_svc.model.torch_compile")
        compiling.compile_model(model, attention, settings.block_size)
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
        num_speculative_tokens=settings.num_speculative_tokens,
    )
    identity = _identity(model, settings, pool)
    source.is_ready()
    progress.end()
    on_arrival = no_op if grammars is None else grammars.prepare_for
    return LoadedRunner(MultiStepRunner(runner), identity, on_arrival)


@dataclass(frozen=True)
class _LoadedModel:
    """A model in memory, and how it is run."""

    model: ServedModel
    implementation: Implementation
    flash: FlashAttention | None
    # To be called once when it can serve.
    is_ready: Callable[[], object]


def _load_model(
    settings: WorkerSettings, device: torch.device, progress: LoadProgress
) -> _LoadedModel:
    """The model from the cache of packed weights, else from its checkpoint."""
    cache = ModelCache.of(settings, device, progress)
    if cache is not None and (packed := cache.load(progress)) is not None:
        reading = cache.read_ahead()

        def is_ready() -> None:
            reading.join()
            cache.begin_to_serve()

        return _LoadedModel(packed, packed.implementation, None, is_ready)
    if not HAS_TRITON:
        # By way of torch's compiler, transformers would import it.
        block_import("triton")
    # transformers takes seconds to import.
    preparation = import_module("worker_svc.runner.model_preparation")
    prepared = preparation.prepare_model(settings, device, progress)

    def store() -> None:
        if cache is not None and prepared.packed is not None:
            cache.store(prepared.packed)

    return _LoadedModel(prepared.model, prepared.implementation, prepared.flash, store)


def _progress(settings: WorkerSettings) -> LoadProgress:
    """A launcher that reads the file shows the progress itself."""
    shown = sys.stderr.isatty() and settings.progress_file is None
    return LoadProgress(settings.progress_file, terminal=sys.stderr if shown else None)


def _identity(model: ServedModel, settings: WorkerSettings, pool: KvPool) -> Identity:
    return Identity(
        model_fingerprint=model.fingerprint,
        block_size=settings.block_size,
        num_blocks=pool.size.num_blocks,
        num_host_blocks=pool.size.num_host_blocks,
        kv_cache_dtype=dtype_name(pool.dtype),
        max_num_seqs=settings.max_num_seqs,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_speculative_tokens=settings.num_speculative_tokens,
    )

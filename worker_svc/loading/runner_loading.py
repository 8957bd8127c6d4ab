"""Loads a model, sizes its cache, and starts its runner."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from structlog.contextvars import bound_contextvars

from worker_svc.cache.cache_setup import CacheSetup, set_up_cache
from worker_svc.cache.kv_pool import KvPool, dtype_name
from worker_svc.errors import WrongSettingError
from worker_svc.gpu.device_memory import CudaMeter
from worker_svc.gpu.gpu_lock import exclusive_lock, lock_file
from worker_svc.grammar.compiler import find_grammars
from worker_svc.loading.devices import find_device, gpu_uuid
from worker_svc.loading.drafter_loading import (
    LoadedDraftModel,
    load_draft_model,
    make_drafter,
    require_speculation,
)
from worker_svc.loading.model_source import ModelSource, load_source
from worker_svc.loading.startup import start_runner
from worker_svc.logits.entry_points import load_processors
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.model.stages.stage import Stage
from worker_svc.plan.tables import RowTables
from worker_svc.ranks.agreement import (
    common_maxima,
    connect_equal,
    wait_for_all,
    with_common_size,
)
from worker_svc.ranks.devices.gpus import exclusive_gpu, take_device
from worker_svc.ranks.devices.pass_watch import PassWatch, WatchedRunner
from worker_svc.ranks.group import end_process
from worker_svc.ranks.leader import LeadingModel
from worker_svc.ranks.requirements import require_ranks
from worker_svc.ranks.start import LeadingRanks, start_ranks
from worker_svc.ranks.threads import keep_to_own_cores, set_threads
from worker_svc.runner.multi_step import MultiStepRunner
from worker_svc.runner.step_runner import Identity, LoadedRunner, no_op
from worker_svc.service.process import keep_freed_memory, return_freed_memory
from worker_svc.settings import WorkerSettings


def load_runner(settings: WorkerSettings) -> LoadedRunner:
    """Load the model and allocate its pool, which takes seconds to minutes. To be called on the
    thread that runs the plans: torch has a pool of threads per calling thread.

    ModelError and WrongSettingError as in `load_model` and `set_up_cache`.
    """
    if settings.model is None:
        raise WrongSettingError("--model / QUIRE_WORKER_MODEL: required to run a model")
    device = find_device(settings.device)
    require_speculation(settings, device)
    require_ranks(settings, device)
    if settings.num_ranks > 1:
        return _load_with_ranks(settings, device)
    set_threads(settings)
    if device.type != "cuda":
        return _load(settings, device)
    with exclusive_lock(lock_file(settings.gpu_locks, gpu_uuid(device))), convert_out_of_memory():
        return _load(settings, device)


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


def _load_with_ranks(settings: WorkerSettings, device: torch.device) -> LoadedRunner:
    with bound_contextvars(rank=0):
        device = take_device(device, 0, settings.num_ranks)
        ranks = start_ranks(settings)
        keep_to_own_cores(settings, 0)
        set_threads(settings)
        try:
            with (
                exclusive_gpu(ranks.group, device, settings.gpu_locks),
                convert_out_of_memory(),
            ):
                loaded = _load(settings, device, ranks)
            wait_for_all(ranks.group)
        except BaseException as error:
            ranks.abort(error)
            raise
        ranks.watch()
        return replace(loaded, close=ranks.close)


def _load(
    settings: WorkerSettings, device: torch.device, ranks: LeadingRanks | None = None
) -> LoadedRunner:
    own_processors = load_processors(settings.logits_processors)
    progress = _progress(settings)
    source = load_source(settings, device, progress, None if ranks is None else ranks.group)
    model, implementation = source.model, source.implementation
    _require_layers_of_one_stage(settings, model)
    draft = load_draft_model(settings, model, device, progress)
    cache = _set_up_cache(settings, source, draft, device, progress, ranks)
    with ThreadPoolExecutor(1, "vocabulary") as thread:
        # It holds the interpreter for a second, in which no row could be served. Zeroing the pool
        # does not need the interpreter.
        reading = thread.submit(find_grammars, model.weights[0].parent, model.vocab_size)
        before_moves = None if ranks is None else ranks.leader.send_moves
        pool = KvPool(cache.layers, cache.size, settings.block_size, device, before_moves)
        grammars = reading.result()
    attention = _set_attention(settings, source, cache, pool)
    begin_logits = None
    if ranks is not None and device.type == "cpu":
        model = leading = LeadingModel(model, attention, ranks.leader)
        begin_logits = leading.begin_logits if ranks.leader.has_stages else None
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
        drafter=make_drafter(settings, draft, pool, tables, implementation),
        begin_logits=begin_logits,
        leader=None if ranks is None else ranks.leader,
    )
    if ranks is not None and device.type == "cuda":
        runner = WatchedRunner(runner, PassWatch(end_process))
    identity = _identity(model, settings, pool)
    source.is_ready()
    if draft is not None:
        draft.source.is_ready()
    progress.end()
    on_arrival = no_op if grammars is None else grammars.prepare_for
    return LoadedRunner(MultiStepRunner(runner), identity, on_arrival)


def _require_layers_of_one_stage(settings: WorkerSettings, model: ServedModel) -> None:
    """WrongSettingError if the settings are for another number of layers. Several stages find that
    when they divide the layers."""
    if settings.pipeline_parallel_size == 1 and settings.layers_of_stages is not None:
        Stage(0, 1, settings.layers_of_stages).layers(len(model.layers), 0)


def _set_up_cache(
    settings: WorkerSettings,
    source: ModelSource,
    draft: LoadedDraftModel | None,
    device: torch.device,
    progress: LoadProgress,
    ranks: LeadingRanks | None,
) -> CacheSetup:
    """All ranks have as many blocks."""
    if ranks is not None:
        progress.begin("waiting for other ranks")
        connect_equal(ranks.group, source.model, settings)
    # Packing has freed buffers, which would count beside the cache.
    return_freed_memory()
    progress.begin("allocating the cache")
    meter = CudaMeter(device) if device.type == "cuda" else None
    cached = None if draft is None else draft.cached
    given = (source.model, settings, source.implementation, source.flash, meter, cached)
    if ranks is None:
        return set_up_cache(*given)
    cache = set_up_cache(*given, of_all_ranks=partial(common_maxima, ranks.group))
    return with_common_size(ranks.group, cache)


def _set_attention(
    settings: WorkerSettings, source: ModelSource, cache: CacheSetup, pool: KvPool
) -> PagedAttention:
    """The model's attention over the pool, in which layers of a draft model come last."""
    num_layers = len(source.model.layers)
    attention = PagedAttention(
        pool.layers[:num_layers],
        source.implementation,
        cache.scales[:num_layers],
        source.flash,
    )
    if settings.enable_torch_compile:
        compiling = import_module("worker_svc.model.torch_compile")
        compiling.compile_model(source.model, attention, settings.block_size)
    else:
        source.model.set_attention(attention)
    return attention


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
        num_stages=settings.pipeline_parallel_size,
    )

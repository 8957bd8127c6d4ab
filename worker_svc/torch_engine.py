"""A loaded model with its pool and tables, ready to run plans."""

import sys

import structlog
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from kernels.choice import Implementation, NoSuchKernel, choose
from kernels.cpu.extension import is_compiled
from worker_svc.attention import PagedAttention
from worker_svc.engine import Engine, Identity
from worker_svc.fusing import fuse
from worker_svc.kv_pool import KvPool, dtype_name, size_pool
from worker_svc.memory import keep_freed_memory
from worker_svc.model import LoadedModel, find_device, load_model
from worker_svc.packing import pack
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings, WrongSettingError
from worker_svc.tables import Tables

log = structlog.get_logger()


def load_engine(settings: WorkerSettings) -> Engine:
    """Loads the model and allocates its pool; takes seconds to minutes. To be called on the thread
    that runs the plans: torch counts its threads per caller.

    ModelError and WrongSettingError as `load_model` and `size_pool` say.
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
    model = load_model(
        settings.model, settings.revision, settings.dtype, device, settings.max_model_len
    )
    implementation = _implementation(model, settings.kernels)
    size = size_pool(
        model.layers,
        settings.block_size,
        model.max_model_len,
        settings.kv_cache_memory,
        settings.num_blocks,
        settings.swap_space,
    )
    pool = KvPool(model.layers, size, settings.block_size, device)
    attention = PagedAttention(pool.layers, implementation)
    model.attend_with(attention)
    exchanged = fuse(model.network, implementation) + pack(model.network, implementation)
    log.info("kernels", implementation=implementation, **exchanged)
    keep_freed_memory()
    tables = Tables(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=model.max_model_len,
        block_size=settings.block_size,
        num_blocks=size.num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    return Engine(
        Runner(model, pool, attention, tables, implementation),
        Identity(
            model_fingerprint=model.fingerprint,
            block_size=settings.block_size,
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            kv_cache_dtype=dtype_name(pool.dtype),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        ),
    )


def _implementation(model: LoadedModel, setting: str) -> Implementation:
    """WrongSettingError if the setting names what cannot serve."""
    wants_cpp = setting not in (
        Implementation.REFERENCE,
        Implementation.TORCH,
        Implementation.TRITON,
    )
    if wants_cpp and model.device.type == "cpu" and not is_compiled():
        log.info("compiling kernels, which takes about a minute")
    dtypes = {model.dtype, *(layer.dtype for layer in model.layers)}
    try:
        return choose(model.device.type, dtypes, setting)
    except NoSuchKernel as error:
        raise WrongSettingError(f"--kernels: {error}") from error

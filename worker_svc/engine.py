"""A loaded model with its pool and tables, ready to run plans."""

from dataclasses import dataclass

import torch

from worker_svc.attention import PagedAttention
from worker_svc.kv_pool import KvPool, dtype_name, size_pool
from worker_svc.model import find_device, load_model
from worker_svc.runner import Runner
from worker_svc.settings import WorkerSettings
from worker_svc.tables import Tables


@dataclass(frozen=True)
class Identity:
    """What a worker tells of itself; fixed once its model is loaded."""

    model_fingerprint: bytes
    block_size: int
    num_blocks: int  # the null block included
    num_host_blocks: int
    kv_cache_dtype: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Engine:
    """What runs the plans, and what it is."""

    runner: Runner
    identity: Identity


def load_engine(settings: WorkerSettings) -> Engine:
    """Loads the model and allocates its pool; takes seconds to minutes. To be called on the thread
    that runs the plans: torch counts its threads per caller.

    ModelError and WrongSettingError as `load_model` and `size_pool` say.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = find_device(settings.device)
    model = load_model(
        settings.model, settings.revision, settings.dtype, device, settings.max_model_len
    )
    size = size_pool(
        model.layers,
        settings.block_size,
        model.max_model_len,
        settings.kv_cache_memory,
        settings.num_blocks,
        settings.swap_space,
    )
    pool = KvPool(model.layers, size, settings.block_size, device)
    attention = PagedAttention(pool.layers)
    model.attend_with(attention)
    tables = Tables(
        settings.max_num_seqs, model.max_model_len, settings.block_size, size.num_blocks
    )
    return Engine(
        Runner(model, pool, attention, tables),
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

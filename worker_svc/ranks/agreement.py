"""What all ranks have to agree on before a worker serves."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import structlog

from worker_svc.cache.cache_setup import CacheSetup
from worker_svc.cache.kv_pool import dtype_name
from worker_svc.cache.kv_scales import KvMaxima
from worker_svc.cache.pool_size import PoolSize
from worker_svc.errors import WrongSettingError
from worker_svc.model.checkpoint import ModelError
from worker_svc.model.served_model import ServedModel
from worker_svc.ranks.devices.device_exchange import connect_nccl
from worker_svc.ranks.group import RankGroup
from worker_svc.settings import WorkerSettings

log = structlog.get_logger()

_ERROR = "error"
# The names of exchanges in which a rank learns that another one could not load its shard.
GPU: Final = "gpu"
MODEL: Final = "model"
_READY: Final = "ready"


def report_failure(group: RankGroup, error: BaseException) -> None:
    """Let the other ranks fail, in `raise_reported`, with the reason that this rank has not
    loaded. What it has given before stays: where ranks differ, each finds that by itself."""
    # Where the store is gone, rank 0 is, and the others will fail by themselves.
    with suppress(RuntimeError):
        for name in (GPU, MODEL, _READY):
            if not group.has_given(name):
                group.exchange_own(name, {_ERROR: str(error)})


def raise_reported(every: Sequence[dict[str, Any]]) -> None:
    """ModelError if another rank could not load its shard."""
    for rank, one in enumerate(every):
        if _ERROR in one:
            raise ModelError(f"rank {rank}: {one[_ERROR]}")


def connect_equal(group: RankGroup, model: ServedModel, settings: WorkerSettings) -> None:
    """Connect ranks that have loaded their shards. WrongSettingError, with both values, if another
    rank has another checkpoint, type or size. ModelError if another rank could not load its
    shard."""
    every = group.exchange(MODEL, _description(model, settings))
    raise_reported(every)
    for rank, one in enumerate(every):
        for name, value in one.items():
            if value != every[0][name]:
                raise WrongSettingError(
                    f"ranks differ in {name}: {every[0][name]} on rank 0, {value} on rank {rank}; "
                    "start all of them with the same one"
                )
    group.connect(connect_nccl if model.device.type == "cuda" else None)


def wait_for_all(group: RankGroup) -> None:
    """Return when every rank can run passes. ModelError if another rank could not be loaded."""
    raise_reported(group.exchange(_READY, {}))


def _description(model: ServedModel, settings: WorkerSettings) -> dict[str, Any]:
    return {
        "type": dtype_name(model.dtype),
        "--device": model.device.type,
        "--kv-cache-dtype": settings.kv_cache_dtype,
        "--quantization": settings.quantization,
        "--int8-activations": settings.int8_activations,
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--pipeline-parallel-size": settings.pipeline_parallel_size,
        "--pipeline-layers": settings.pipeline_layers,
        "--enforce-eager": settings.enforce_eager,
        "--block-size": settings.block_size,
        "--max-model-len": model.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        # It depends on the types, too.
        "checkpoint (fingerprint)": model.fingerprint.hex(),
    }


def common_maxima(group: RankGroup, maxima: tuple[KvMaxima, ...]) -> tuple[KvMaxima, ...]:
    """The largest keys and values of the ranks of a stage, each of which has some heads: so scales
    are those of a worker of one rank."""
    if group.of_stage.size == 1:
        return maxima
    numbers = group.of_stage.largest([number for one in maxima for number in (one.key, one.value)])
    return tuple(map(KvMaxima, numbers[::2], numbers[1::2]))


def with_common_size(group: RankGroup, cache: CacheSetup) -> CacheSetup:
    """The blocks that the poorest rank can hold."""
    own = cache.size
    num_blocks, num_host_blocks = group.smallest([own.num_blocks, own.num_host_blocks])
    log.info(
        "blocks of all ranks",
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        own_num_blocks=own.num_blocks,
        own_num_host_blocks=own.num_host_blocks,
    )
    return replace(cache, size=PoolSize(num_blocks, num_host_blocks))

"""The life of a follower: joins the other ranks, loads its shard, follows rank 0."""

import os
import signal
import threading
from functools import partial
from typing import Final

import structlog
import torch
from structlog.contextvars import bind_contextvars

from quire.service.logs import configure_logging
from worker_svc.cache.cache_setup import set_up_cache
from worker_svc.cache.kv_pool import KvPool
from worker_svc.errors import WrongSettingError
from worker_svc.gpu.device_memory import CudaMeter
from worker_svc.gpu.device_pass import StepSizes
from worker_svc.gpu.streams import CudaStreams
from worker_svc.loading.devices import find_device
from worker_svc.loading.model_source import load_source
from worker_svc.model.load_progress import LoadProgress
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.ranks.agreement import (
    MODEL,
    common_maxima,
    connect_equal,
    report_failure,
    wait_for_all,
    with_common_size,
)
from worker_svc.ranks.devices.device_follower import DeviceFollower, follow_on_device
from worker_svc.ranks.devices.gpus import exclusive_gpu, take_device
from worker_svc.ranks.devices.rank_graphs import rank_capturer
from worker_svc.ranks.follower import Follower
from worker_svc.ranks.group import RANK_LOST, RankGroup, end_process
from worker_svc.ranks.heartbeats import send_heartbeats
from worker_svc.ranks.rendezvous import own_place
from worker_svc.ranks.threads import keep_to_own_cores, set_threads
from worker_svc.service.process import keep_freed_memory, resume_collections, return_freed_memory
from worker_svc.settings import WorkerSettings

log = structlog.get_logger()

# What rank 0 gets to read why this rank has failed, and to end the others.
_REPORTED_S: Final = 10.0


def follow(settings: WorkerSettings, *, is_child: bool) -> int:
    """Run a follower until rank 0 stops it or is lost; return the process's exit status.
    `is_child`: rank 0 has started this process, and ends with it."""
    configure_logging("worker", settings.log_level, settings.log_format)
    # Rank 0 drains, and then stops the others.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    place = own_place(settings)
    if place is None:
        raise WrongSettingError("a follower needs the variables RANK, WORLD_SIZE and MASTER_ADDR")
    bind_contextvars(rank=place.rank)
    keep_to_own_cores(settings, place.rank)
    set_threads(settings)
    # It waits as long as ranks may take to start.
    log.info("joining rank 0", address=f"{place.host}:{place.port}", ranks=place.size)
    group = RankGroup(
        place.store(),
        place.rank,
        place.size,
        place.interface(),
        num_stages=settings.pipeline_parallel_size,
    )
    is_loading = False
    try:
        device = find_device(settings.device)
        # This thread may wait for a message that never comes.
        send_heartbeats(place.store(), place.rank, end_process)
        device = take_device(device, place.rank, place.size)
        with exclusive_gpu(group, device, settings.gpu_locks):
            is_loading = True
            follower = _load(settings, group, device)
        log.info("rank ready", process=os.getpid())
        wait_for_all(group)
    except Exception as error:
        log.error("shard not loaded", reason=str(error))
        _report(group, error, is_loading_child=is_child and is_loading)
        return RANK_LOST
    finally:
        resume_collections()
    follower.run()
    return 0


def _report(group: RankGroup, error: Exception, *, is_loading_child: bool) -> None:
    """Report to rank 0, and wait until it has read that."""
    # Rank 0 reads it when its own shard is loaded, which may take minutes, and kills its children.
    # Before and behind that, it may wait for a message of this process instead.
    is_read_later = is_loading_child and not group.has_given(MODEL)
    report_failure(group, error)
    threading.Event().wait(None if is_read_later else _REPORTED_S)


def _load(
    settings: WorkerSettings, group: RankGroup, device: torch.device
) -> Follower | DeviceFollower:
    """Make the calls that rank 0 makes."""
    source = load_source(settings, device, LoadProgress(), group)
    model = source.model
    connect_equal(group, model, settings)
    return_freed_memory()
    meter = CudaMeter(device) if device.type == "cuda" else None
    cache = set_up_cache(
        model,
        settings,
        source.implementation,
        source.flash,
        meter,
        of_all_ranks=partial(common_maxima, group),
    )
    cache = with_common_size(group, cache)
    pool = KvPool(cache.layers, cache.size, settings.block_size, device)
    attention = PagedAttention(pool.layers, source.implementation, cache.scales, source.flash)
    model.set_attention(attention)
    keep_freed_memory()
    if device.type == "cpu":
        return Follower(model, pool, attention, group)
    return follow_on_device(
        model,
        pool,
        attention,
        StepSizes(
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            model.max_model_len,
            settings.block_size,
        ),
        CudaStreams(),
        None if settings.enforce_eager else rank_capturer(),
        group,
    )

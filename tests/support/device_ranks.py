"""Ranks on GPUs, without GPUs: a pipelined runner and its followers on the host, with Gloo in place
of NCCL. Ranks are threads."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch
from host_device import HostStreams
from rank_threads import LOOPBACK, rank_threads
from torch.distributed import PrefixStore, ProcessGroupGloo
from worker_driver import BLOCK_SIZE

from worker_svc.cache.kv_pool import KvPool
from worker_svc.cache.pool_size import PoolSize
from worker_svc.gpu.device_pass import StepSizes
from worker_svc.gpu.graphs import Capturer
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.loading.model_preparation import PreparedModel
from worker_svc.loading.startup import start_pipelined
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.plan.tables import RowTables
from worker_svc.ranks.devices.device_exchange import DeviceExchange
from worker_svc.ranks.devices.device_follower import DeviceFollower, follow_on_device
from worker_svc.ranks.group import RankGroup
from worker_svc.ranks.leader import Leader

_CPU: Final = torch.device("cpu")


def connect_gloo(store: Any, rank: int, size: int) -> DeviceExchange:
    """In place of `connect_nccl`."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._threads = 1
    backend = ProcessGroupGloo(PrefixStore("devices", store), rank, size, options)
    return DeviceExchange(backend, rank, size)


def leading_runner(
    one: PreparedModel,
    sizes: StepSizes,
    blocks: PoolSize,
    leader: Leader | None,
    capturer: Capturer | None,
) -> PipelinedRunner:
    """That of rank 0, or of a worker of one rank."""
    pool, attention = _placed(one, blocks, None if leader is None else leader.send_moves)
    tables = RowTables(
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=blocks.num_blocks,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
    )
    streams = HostStreams()
    return start_pipelined(
        *(one.model, pool, attention, tables, one.implementation, streams, capturer),
        followers=leader,
    )


def follower(
    one: PreparedModel,
    sizes: StepSizes,
    blocks: PoolSize,
    group: RankGroup,
    capturer: Capturer | None,
) -> DeviceFollower:
    pool, attention = _placed(one, blocks)
    return follow_on_device(one.model, pool, attention, sizes, HostStreams(), capturer, group)


def _placed(
    one: PreparedModel, blocks: PoolSize, moves: Any = None
) -> tuple[KvPool, PagedAttention]:
    pool = KvPool(one.model.layers, blocks, BLOCK_SIZE, _CPU, moves)
    attention = PagedAttention(pool.layers, one.implementation)
    one.model.set_attention(attention)
    return pool, attention


@contextmanager
def leading_device(
    prepare: Any, sizes: StepSizes, blocks: PoolSize, capturers: Sequence[Capturer | None]
) -> Iterator[PipelinedRunner]:
    """The runner of rank 0, with a follower for each further capturer. `prepare` makes the shard of
    a group."""
    with (
        rank_threads(len(capturers), connect_devices=connect_gloo) as ranks,
        ThreadPoolExecutor(len(capturers)) as threads,
    ):
        shards = [prepare(group) for group in ranks.groups]

        def follow(rank: int) -> None:
            group = ranks.groups[rank]
            follower(shards[rank], sizes, blocks, group, capturers[rank]).run()

        following: list[Future[None]] = [
            threads.submit(follow, rank) for rank in range(1, len(capturers))
        ]
        leader = Leader(ranks.groups[0])
        yield leading_runner(shards[0], sizes, blocks, leader, capturers[0])
        leader.stop()
        for each in following:
            each.result(timeout=10)

"""Which runner serves a model: on a processor each step runs at once, on a GPU steps queue up."""

import torch

from kernels.choice import Implementation
from worker_svc.attention import PagedAttention
from worker_svc.device_pass import DevicePass
from worker_svc.graphs import Capturer, CudaCapturer
from worker_svc.kv_pool import KvPool
from worker_svc.model import LoadedModel
from worker_svc.pipelined_runner import PipelinedRunner
from worker_svc.runner import Runner
from worker_svc.staging import Staging, largest_step_bytes
from worker_svc.step_runner import StepRunner
from worker_svc.streams import CudaStreams, Streams
from worker_svc.tables import Tables
from worker_svc.warmup import Limits, warm_up


def start_runner(
    model: LoadedModel,
    pool: KvPool,
    attention: PagedAttention,
    tables: Tables,
    implementation: Implementation,
    *,
    enforce_eager: bool,
) -> StepRunner:
    """Ready for the first plan. `enforce_eager` does without graphs."""
    if model.device.type != "cuda":
        return Runner(model, pool, attention, tables, implementation)
    capturer = None if enforce_eager else CudaCapturer()
    return start_pipelined(model, pool, attention, tables, implementation, CudaStreams(), capturer)


@torch.inference_mode()
def start_pipelined(
    model: LoadedModel,
    pool: KvPool,
    attention: PagedAttention,
    tables: Tables,
    implementation: Implementation | None,
    streams: Streams,
    capturer: Capturer | None,
) -> PipelinedRunner:
    """Warmed up; without graphs if there is no capturer."""
    limits = Limits(tables.max_num_seqs, tables.max_num_batched_tokens, tables.max_model_len)
    device_pass = DevicePass(
        model, attention, pool.block_size, limits.max_num_seqs, limits.max_model_len
    )
    num_bytes = largest_step_bytes(
        limits.max_num_seqs, limits.max_num_batched_tokens, tables.block_table.shape[1]
    )
    staging = Staging(num_bytes, model.device, streams)
    warm_up(device_pass, pool, staging, streams, limits, implementation, capturer)
    return PipelinedRunner(device_pass, pool, tables, staging, streams, implementation)

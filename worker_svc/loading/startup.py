"""Creates the runner of a model: on a CPU each step runs at once, on a GPU steps are queued.

A GPU is warmed up first (`worker_svc/gpu/device_pass.py`), and so is the sampler behind its passes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.logits import apply_bitmask, apply_penalties, bitmask_width
from kernels.sampling import SamplingTensors, sample, token_logprobs
from kernels.typical_p import apply_typical_p
from worker_svc.cache.kv_pool import KvPool
from worker_svc.gpu.device_pass import StepSizes, prepare_device_pass
from worker_svc.gpu.graphs import Capturer, CudaCapturer
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.gpu.step_arrays import Followers
from worker_svc.gpu.streams import CudaStreams, Streams
from worker_svc.grammar.compiler import GrammarCompiler
from worker_svc.logits.built_in import ProcessorFactory, make_pipeline
from worker_svc.logits.processor import ProcessorContext
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.plan.logprobs import MAX_NUM_LOGPROBS
from worker_svc.plan.tables import RowTables
from worker_svc.ranks.devices.rank_graphs import rank_capturer
from worker_svc.ranks.leader import Leader
from worker_svc.runner.runner import BeginLogits, Runner
from worker_svc.runner.staged_runner import StagedRunner
from worker_svc.runner.step_runner import StepRunner, no_op
from worker_svc.speculation.drafter import Drafter

# Temperature, top_k, top_p: every path of the sampler. min_p has no path of its own.
_SAMPLING: Final = ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 20, 1.0), (1.0, 0, 0.9), (1.0, 20, 0.9))


def start_runner(
    model: ServedModel,
    pool: KvPool,
    attention: PagedAttention,
    tables: RowTables,
    implementation: Implementation,
    *,
    enforce_eager: bool,
    grammars: GrammarCompiler | None = None,
    own_processors: Mapping[str, ProcessorFactory] | None = None,
    drafter: Drafter | None = None,
    begin_logits: BeginLogits | None = None,
    leader: Leader | None = None,
) -> StepRunner:
    """A runner that is ready for the first plan. `enforce_eager`: without CUDA graphs. Without
    `grammars`, rows that follow one fail. A GPU's runner does not speculate. `begin_logits` is that
    of a model of several stages, `leader` that of several ranks on GPUs."""
    if model.device.type != "cuda":
        context = _context(model, tables, implementation, _copy, grammars)
        processors = make_pipeline(context, own_processors)
        runner = Runner(
            model, pool, attention, tables, processors, implementation, drafter, begin_logits
        )
        return runner if begin_logits is None else StagedRunner(runner)
    return start_pipelined(
        model,
        pool,
        attention,
        tables,
        implementation,
        CudaStreams(),
        None if enforce_eager else _capturer(leader),
        grammars,
        own_processors,
        leader,
    )


def _context(
    model: ServedModel,
    tables: RowTables,
    implementation: Implementation,
    upload: Callable[[NDArray[Any], torch.device], Tensor],
    grammars: GrammarCompiler | None,
) -> ProcessorContext:
    return ProcessorContext(
        vocab_size=model.vocab_size,
        max_num_seqs=tables.max_num_seqs,
        max_model_len=tables.max_model_len,
        device=model.device,
        implementation=implementation,
        upload=lambda array: upload(array, model.device),
        grammars=grammars,
    )


def _copy(array: NDArray[Any], device: torch.device) -> Tensor:
    # NumPy copies small arrays in a third of the time of torch.tensor.
    return torch.from_numpy(array.copy()).to(device)


def _capturer(leader: Leader | None) -> Capturer:
    return CudaCapturer() if leader is None else rank_capturer()


def start_pipelined(
    model: ServedModel,
    pool: KvPool,
    attention: PagedAttention,
    tables: RowTables,
    implementation: Implementation,
    streams: Streams,
    capturer: Capturer | None,
    grammars: GrammarCompiler | None = None,
    own_processors: Mapping[str, ProcessorFactory] | None = None,
    followers: Followers | None = None,
) -> PipelinedRunner:
    """Warmed up; without a capturer there are no graphs. `followers` are the other ranks of a
    worker, which run its passes."""
    sizes = StepSizes(
        tables.max_num_seqs,
        tables.max_num_batched_tokens,
        tables.max_model_len,
        pool.block_size,
    )

    def warm_up_sampler(logits: Tensor) -> None:
        """Run everything behind a pass, up to the copy of its results to the host."""
        # The null block may hold anything, so its logits may be NaN.
        logits = torch.randn_like(logits)
        _change(logits, implementation)
        streams.fetch(_sample(logits, implementation))

    share_ids = no_op if followers is None else followers.share_ids
    device_pass = prepare_device_pass(
        model, pool, attention, sizes, streams, capturer, share_ids, warm_up_sampler
    )
    context = _context(model, tables, implementation, streams.upload, grammars)
    processors = make_pipeline(context, own_processors)
    return PipelinedRunner(
        device_pass, pool, tables, streams, processors, implementation, followers
    )


def _sample(logits: Tensor, implementation: Implementation) -> Sequence[Tensor]:
    """Run every path of the sampler, with log-probabilities and without."""
    num_rows, device = len(logits), logits.device
    for temperature, top_k, top_p in _SAMPLING:
        params = SamplingTensors(
            temperatures=torch.full((num_rows,), temperature, device=device),
            top_ks=torch.full((num_rows,), top_k, device=device),
            top_ps=torch.full((num_rows,), top_p, device=device),
            min_ps=torch.zeros(num_rows, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        tokens = sample(logits, params, implementation=implementation)
    num_top = min(MAX_NUM_LOGPROBS - 1, logits.shape[1])
    entries = token_logprobs(logits, tokens, num_top, implementation=implementation)
    return [tokens, entries.token_ids, entries.logprobs, entries.ranks]


def _change(logits: Tensor, implementation: Implementation) -> None:
    """Run all changes of logits."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    lines = torch.arange(num_rows, device=device)
    width = bitmask_width(vocab_size)
    bitmask = torch.full((num_rows, width), -1, dtype=torch.int32, device=device)
    apply_bitmask(logits, bitmask, lines, implementation=implementation)
    counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
    penalties = torch.ones(1, 3, device=device)
    slots = torch.zeros_like(lines)
    apply_penalties(logits, counts, lines, slots, penalties, implementation=implementation)
    ones = torch.ones(num_rows, device=device)
    apply_typical_p(logits, lines, ones, ones / 2, implementation=implementation)

"""Creates the runner of a model: on a CPU each step runs at once, on a GPU steps are queued.

A GPU is warmed up first: kernels are compiled, libraries allocate their memory, and CUDA graphs are
captured. Warm-up writes no slot and reads only the null block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.gpu.linear_launch import ROW_TILES
from kernels.logits import apply_bitmask, apply_penalties, bitmask_width
from kernels.sampling import SamplingTensors, sample, token_logprobs
from kernels.typical_p import apply_typical_p
from worker_svc.cache.kv_pool import KvPool
from worker_svc.gpu.device_forward import DeviceForward
from worker_svc.gpu.device_inputs import Arrays, ForwardInputs
from worker_svc.gpu.graphs import Capturer, CudaCapturer, graph_sizes
from worker_svc.gpu.pipelined_runner import PipelinedRunner
from worker_svc.gpu.staging import Staging, largest_step_bytes
from worker_svc.gpu.streams import CudaStreams, Streams
from worker_svc.grammar.compiler import GrammarCompiler
from worker_svc.logits.built_in import ProcessorFactory, make_pipeline
from worker_svc.logits.processor import ProcessorContext
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.plan.logprobs import MAX_NUM_LOGPROBS
from worker_svc.plan.tables import RowTables
from worker_svc.runner.runner import BeginLogits, Runner
from worker_svc.runner.staged_runner import StagedRunner
from worker_svc.runner.step_runner import StepRunner
from worker_svc.speculation.drafter import Drafter

# A length at which attention splits the keys of each sequence.
_LONG: Final = 1024
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
) -> StepRunner:
    """A runner that is ready for the first plan. `enforce_eager`: without CUDA graphs. Without
    `grammars`, rows that follow one fail. A GPU's runner does not speculate. `begin_logits` is that
    of a model of several stages."""
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
        None if enforce_eager else CudaCapturer(),
        grammars,
        own_processors,
    )


def _context(
    model: ServedModel,
    tables: RowTables,
    implementation: Implementation | None,
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


@torch.inference_mode()
def start_pipelined(
    model: ServedModel,
    pool: KvPool,
    attention: PagedAttention,
    tables: RowTables,
    implementation: Implementation | None,
    streams: Streams,
    capturer: Capturer | None,
    grammars: GrammarCompiler | None = None,
    own_processors: Mapping[str, ProcessorFactory] | None = None,
) -> PipelinedRunner:
    """Warmed up; without a capturer there are no graphs."""
    device_forward = DeviceForward(
        model, attention, pool.block_size, tables.max_num_seqs, tables.max_model_len
    )
    num_bytes = largest_step_bytes(
        tables.max_num_seqs, tables.max_num_batched_tokens, tables.block_table.shape[1]
    )
    staging = Staging(num_bytes, model.device, streams)
    _warm_up(device_forward, staging, streams, tables, implementation)
    pool.warm_up()
    if capturer is not None:
        device_forward.capture(graph_sizes(tables.max_num_seqs), staging, capturer)
        # Capturing returns free memory to the driver. This run allocates it again, so too little
        # memory for the largest batch beside the graphs shows now.
        _warm_up(device_forward, staging, streams, tables, implementation)
    streams.synchronize()
    context = _context(model, tables, implementation, streams.upload, grammars)
    processors = make_pipeline(context, own_processors)
    return PipelinedRunner(
        device_forward, pool, tables, staging, streams, processors, implementation
    )


def _warm_up(
    device_forward: DeviceForward,
    staging: Staging,
    streams: Streams,
    tables: RowTables,
    implementation: Implementation | None,
) -> None:
    """Run steps of all kinds, up to the copy of their results to the host."""
    for query_lens, seq_lens in _batches(tables):
        tensors = staging.send(dummy_batch(query_lens, seq_lens, device_forward.padding_row))
        inputs = ForwardInputs(**tensors)
        sampled = inputs.query_start_loc[1:] - 1
        if sum(query_lens) <= ROW_TILES[-1]:
            # As of prompts whose log-probabilities are wanted.
            sampled = torch.arange(sum(query_lens), device=device_forward.model.device)
        logits = device_forward.launch(inputs, sampled, max(query_lens), max(seq_lens))
    # The null block may hold anything, so its logits may be NaN.
    logits = torch.randn_like(logits)
    _change(logits, implementation)
    streams.fetch(_sample(logits, implementation))


def dummy_batch(query_lens: list[int], seq_lens: list[int], padding_row: int) -> Arrays:
    """`ForwardInputs` of queries at the ends of sequences that consist of the null block."""
    ends = zip(query_lens, seq_lens, strict=True)
    return {
        "input_ids": np.zeros(sum(query_lens), np.int64),
        "positions": np.concatenate([np.arange(seq - query, seq) for query, seq in ends]),
        "slot_mapping": np.full(sum(query_lens), -1),
        "query_start_loc": np.cumsum([0, *query_lens]),
        "seq_lens": np.array(seq_lens),
        "rows": np.full(len(query_lens), padding_row),
    }


def _batches(tables: RowTables) -> Iterator[tuple[list[int], list[int]]]:
    """Lengths of queries and sequences: batches of prompts, the largest first, then decode batches,
    small and large, short and long. Products with few, some and many rows have kernels of their
    own: those of layers by the number of tokens, those of the head by that of rows of logits."""
    longest, most_rows = tables.max_model_len, tables.max_num_seqs
    most_tokens = tables.max_num_batched_tokens
    for num_tokens in (most_tokens, *(size for size in ROW_TILES if size < most_tokens)):
        whole, rest = divmod(num_tokens, longest)
        prompts = [longest] * whole + [rest] * bool(rest)
        yield prompts[:most_rows], prompts[:most_rows]
    num_rows = min(most_rows, most_tokens)
    for seq_lens in ([1], [longest], [1] * num_rows, [min(longest, _LONG)] * num_rows):
        yield [1] * len(seq_lens), seq_lens


def _sample(logits: Tensor, implementation: Implementation | None) -> Sequence[Tensor]:
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


def _change(logits: Tensor, implementation: Implementation | None) -> None:
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

"""Profiling: runs the largest batch before the pool is allocated, to measure its memory and the
largest keys and values. It writes to blocks of its own, which are freed before the pool."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernels.attention import PagedBatch
from kernels.dispatch import Implementation
from kernels.flash import FlashAttention
from kernels.sampling import SamplingTensors, sample, token_logprobs
from worker_svc.cache.kv_pool import KvPool
from worker_svc.cache.kv_scales import KvMaxima
from worker_svc.cache.pool_size import DeviceMemory, PoolSize
from worker_svc.gpu.device_memory import MemoryMeter
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.model.served_model import ServedModel
from worker_svc.plan.inputs import InputBuffers, StepInputs, prepare_inputs
from worker_svc.plan.logprobs import MAX_NUM_LOGPROBS

_SEED = 0


@dataclass(frozen=True)
class ProfileBatch:
    """Whole prompts of random tokens, all of which sample."""

    inputs: StepInputs
    block_table: NDArray[np.int32]
    block_size: int

    @property
    def num_blocks(self) -> int:
        """The null block included."""
        return int(self.block_table.max(initial=0)) + 1


def largest_batch(
    num_tokens: int, num_rows: int, max_model_len: int, block_size: int, vocab_size: int
) -> ProfileBatch:
    """Prompts whose lengths add up to `num_tokens` and differ by one token at most."""
    num_rows = min(num_rows, num_tokens)
    lens = np.full(num_rows, num_tokens // num_rows)
    lens[: num_tokens % num_rows] += 1
    np.minimum(lens, max_model_len, out=lens)
    width = -(-int(lens.max()) // block_size)
    generator = np.random.default_rng(_SEED)
    tokens = generator.integers(0, vocab_size, (num_rows, int(lens.max())), dtype=np.int32)
    blocks = np.arange(1, num_rows * width + 1, dtype=np.int32).reshape(num_rows, width)
    inputs = prepare_inputs(
        np.arange(num_rows),
        lens,
        np.zeros(num_rows, np.int64),
        lens,
        tokens,
        blocks,
        block_size,
        InputBuffers(num_rows, int(lens.sum())),
    )
    return ProfileBatch(inputs, blocks, block_size)


class MaximaRecorder:
    """An attention function that records the largest keys and values, then calls another one."""

    def __init__(self, attention: PagedAttention) -> None:
        self._attention = attention
        self._maxima: list[Tensor] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kw: Any,
    ) -> tuple[Tensor, None]:
        self._maxima.append(torch.stack([_largest(key), _largest(value)]).float())
        return self._attention(module, query, key, value, *args, **kw)

    def end(self) -> tuple[KvMaxima, ...]:
        """The maxima per layer. Releases the caches, because the model keeps this function until
        it is replaced."""
        del self._attention
        return tuple(KvMaxima(*layer.tolist()) for layer in self._maxima)


def _largest(states: Tensor) -> Tensor:
    """The largest magnitude; NaN if the tensor contains one."""
    low, high = states.aminmax()
    return torch.maximum(-low, high)


@dataclass(frozen=True)
class ProfileRun:
    """The result of a profiling run."""

    maxima: tuple[KvMaxima, ...]  # per layer
    cache_bytes: int  # of its own blocks, freed before the pool is allocated


@torch.inference_mode()
def run_batch(
    model: ServedModel,
    batch: ProfileBatch,
    implementation: Implementation,
    flash: FlashAttention | None = None,
    *,
    sampling: bool = True,
) -> ProfileRun:
    """Run one step of the batch, with the cache in the model's own dtype. Afterwards the model's
    attention function must be replaced."""
    shapes = tuple(dict.fromkeys(model.layers))
    # A layer reads what it wrote before the next one writes, so equal layers share a cache.
    scratch = KvPool(shapes, PoolSize(batch.num_blocks, 0), batch.block_size, model.device)
    shared = dict(zip(shapes, scratch.layers, strict=True))
    attention = PagedAttention(
        [shared[shape] for shape in model.layers], implementation, None, flash
    )
    attention.set_batch(*_paged(batch, model.device))
    recorder = MaximaRecorder(attention)
    model.set_attention(recorder)
    inputs = batch.inputs
    ids, positions, indices = (
        torch.from_numpy(array).to(model.device)
        for array in (inputs.input_ids, inputs.positions, inputs.logits_indices)
    )
    logits = model.logits(ids, positions, indices)
    if sampling:
        _sample(logits, implementation)
    cache_bytes = sum(cache.nbytes for pair in scratch.layers for cache in pair)
    return ProfileRun(recorder.end(), cache_bytes)


def _paged(batch: ProfileBatch, device: torch.device) -> tuple[PagedBatch, Tensor]:
    inputs = batch.inputs
    table, starts, lens, slots = (
        torch.from_numpy(array).to(device)
        for array in (
            batch.block_table,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.slot_mapping,
        )
    )
    longest = inputs.max_query_len
    return PagedBatch(table, starts, lens, batch.block_size, longest, longest), slots


def _sample(logits: Tensor, implementation: Implementation) -> None:
    """Sample with all parameters of a request set."""
    num_rows, vocab_size = logits.shape
    ones = torch.ones(num_rows, device=logits.device)
    numbers = torch.arange(num_rows, device=logits.device)
    params = SamplingTensors(
        temperatures=ones,
        top_ks=torch.full_like(numbers, vocab_size // 2),
        top_ps=ones * 0.9,
        min_ps=ones * 1e-9,
        seeds=numbers,
        positions=numbers,
    )
    tokens = sample(logits, params, implementation=implementation)
    num_top = min(MAX_NUM_LOGPROBS - 1, vocab_size)
    token_logprobs(logits, tokens.clamp(min=0), num_top, implementation=implementation)


def measure(meter: MemoryMeter, run: Callable[[], ProfileRun]) -> tuple[ProfileRun, DeviceMemory]:
    """Run and measure; before the run torch holds only the weights. Afterwards all memory of the
    run is returned to the driver."""
    meter.reset()
    before = meter.read()
    result = run()
    after = meter.read()
    meter.reset()
    return result, DeviceMemory(
        total=after.total,
        others=before.non_torch,
        weights=before.allocated,
        peak_activations=after.peak - before.allocated - result.cache_bytes,
        # Other processes may have freed more than libraries allocated.
        non_torch=max(0, after.non_torch - before.non_torch),
    )

"""The largest batch, run once before there is a pool: what memory it takes, and how large keys and
values become.

Its keys and values go to blocks of its own, which are gone when the pool is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernels.attention import PagedBatch
from kernels.choice import Implementation
from kernels.flash import FlashAttention
from kernels.sampling import RowParams, sample, token_logprobs
from worker_svc.attention import PagedAttention
from worker_svc.device_memory import MemoryMeter
from worker_svc.inputs import InputBuffers, StepInputs, prepare_inputs
from worker_svc.kv_pool import KvPool
from worker_svc.kv_scales import KvMaxima
from worker_svc.logprobs import MAX_NUM_LOGPROBS
from worker_svc.model import LoadedModel
from worker_svc.pool_size import DeviceMemory, PoolSize

_SEED = 0


@dataclass(frozen=True)
class ProfileBatch:
    """Whole prompts of random tokens, every one of which samples."""

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
    """As many tokens in as many rows as there may be; of equal length, but for one token."""
    num_rows = min(num_rows, num_tokens)
    lens = np.full(num_rows, num_tokens // num_rows)
    lens[: num_tokens % num_rows] += 1
    np.minimum(lens, max_model_len, out=lens)
    width = -(-int(lens.max()) // block_size)
    draw = np.random.default_rng(_SEED)
    tokens = draw.integers(0, vocab_size, (num_rows, int(lens.max())), dtype=np.int32)
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
    """An attention function that notes how large keys and values are on their way to another."""

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
        """What was noted, per layer. The model keeps the function until it is given another one,
        so this lets go of the caches."""
        del self._attention
        return tuple(KvMaxima(*layer.tolist()) for layer in self._maxima)


def _largest(states: Tensor) -> Tensor:
    """The largest magnitude; NaN if there is one."""
    low, high = states.aminmax()
    return torch.maximum(-low, high)


@dataclass(frozen=True)
class ProfileRun:
    """What a run of the largest batch showed."""

    maxima: tuple[KvMaxima, ...]  # per layer
    cache_bytes: int  # of its blocks, which the pool will not need beside its own


@torch.inference_mode()
def run_batch(
    model: LoadedModel,
    batch: ProfileBatch,
    implementation: Implementation,
    flash: FlashAttention | None = None,
    *,
    sampling: bool = True,
) -> ProfileRun:
    """One step of the batch, with the cache in the model's own dtype. The model attends with what
    it was given for it until it is given another function."""
    shapes = tuple(dict.fromkeys(model.layers))
    # What a layer writes it alone reads, before the next one writes.
    scratch = KvPool(shapes, PoolSize(batch.num_blocks, 0), batch.block_size, model.device)
    shared = dict(zip(shapes, scratch.layers, strict=True))
    attention = PagedAttention(
        [shared[shape] for shape in model.layers], implementation, None, flash
    )
    attention.begin(*_paged(batch, model.device))
    recorder = MaximaRecorder(attention)
    model.attend_with(recorder)
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
    """With everything that a row may ask for."""
    num_rows, vocab_size = logits.shape
    ones = torch.ones(num_rows, device=logits.device)
    numbers = torch.arange(num_rows, device=logits.device)
    params = RowParams(
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
    """What the run takes beside the weights, which are all that is there before. Leaves nothing of
    it with torch."""
    meter.restart()
    before = meter.read()
    result = run()
    after = meter.read()
    meter.restart()
    return result, DeviceMemory(
        total=after.total,
        others=before.beside_torch,
        weights=before.allocated,
        peak_activations=after.peak - before.allocated - result.cache_bytes,
        # Other processes may have given back more than libraries took.
        non_torch=max(0, after.beside_torch - before.beside_torch),
    )

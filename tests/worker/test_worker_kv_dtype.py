"""Caches of 8 bits, against transformers with keys and values that are rounded in the same way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_cases import relative_rms
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, VOCAB_SIZE, Reference, llama, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from worker_driver import BLOCK_SIZE, Driver, LaneClient, Sequence, served_model, worker_settings

from kernels.attention import PagedBatch
from kernels.dispatch import choose
from worker_svc.cache import cache_setup
from worker_svc.cache.cache_setup import CacheSetup, set_up_cache
from worker_svc.cache.kv_pool import AttentionSpec, KvPool
from worker_svc.cache.kv_scales import KvScales
from worker_svc.cache.pool_size import PoolSize
from worker_svc.cache.profiling import largest_batch
from worker_svc.model.loading import LoadedModel, load_model
from worker_svc.model.paged_attention import PagedAttention
from worker_svc.plan.plans import BlockMoves

_CPU = torch.device("cpu")
_MODELING = {
    "llama": modeling_llama,
    "qwen3": modeling_qwen3,
    "gemma2": modeling_gemma2,
    "gpt2": modeling_gpt2,
}
_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_SCALES = tuple(KvScales(0.01 * (i + 1), 0.003 * (i + 2)) for i in range(3))
_NUM_TOKENS = 24


def rounded(states: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """As a cache of 8 bits gives them back."""
    largest = torch.finfo(dtype).max
    return (states.float() / scale).clamp(-largest, largest).to(dtype).float() * scale


def round_in_transformers(
    family: str, scales: tuple[KvScales, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the family's own attention see rounded keys and values."""
    modeling = _MODELING[family]
    eager = modeling.eager_attention_forward

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        scale = scales[module.layer_idx]
        key, value = rounded(key, scale.key, dtype), rounded(value, scale.value, dtype)
        return eager(module, query, key, value, *args, **kw)

    monkeypatch.setattr(modeling, "eager_attention_forward", attention)


def set_up(folder: Path, kv_cache_dtype: str, **changes: Any) -> tuple[LoadedModel, CacheSetup]:
    settings = worker_settings(folder, kv_cache_dtype=kv_cache_dtype, **changes)
    model = load_model(str(folder), None, "auto", _CPU, None)
    return model, set_up_cache(model, settings, choose("cpu", ()), None, None)


def paged_logits(model: LoadedModel, cache: CacheSetup, tokens: Tensor, chunk: int) -> Tensor:
    """Of all tokens of one sequence, which is computed in chunks."""
    pool = KvPool(cache.layers, cache.size, BLOCK_SIZE, _CPU)
    attention = PagedAttention(pool.layers, choose("cpu", ()), cache.scales)
    model.set_attention(attention)
    blocks = torch.randperm(cache.size.num_blocks - 1)[: -(-len(tokens) // BLOCK_SIZE)] + 1
    logits: list[Tensor] = []
    for positions in torch.arange(len(tokens)).split(chunk):
        batch = PagedBatch(
            block_table=blocks.to(torch.int32).unsqueeze(0),
            query_start_loc=torch.tensor([0, len(positions)]),
            seq_lens=positions[-1:] + 1,
            block_size=BLOCK_SIZE,
        )
        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        attention.set_batch(batch, slots)
        with torch.inference_mode():
            indices = torch.arange(len(positions))
            logits.append(model.logits(tokens[positions], positions, indices))
    return torch.cat(logits)


@pytest.mark.parametrize("kv_cache_dtype", sorted(_DTYPES))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_those_of_rounded_keys_and_values(
    family: str, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(FAMILIES[family](), tmp_path)
    model, cache = set_up(folder, kv_cache_dtype)
    tokens = torch.randint(VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(3))
    paged = paged_logits(model, cache, tokens, chunk=7)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        exact = reference(tokens.unsqueeze(0)).logits[0]
        round_in_transformers(family, cache.scales, _DTYPES[kv_cache_dtype], monkeypatch)
        expected = reference(tokens.unsqueeze(0)).logits[0]
    assert relative_rms(paged, expected) < 5e-3
    # The rounding is there to be seen.
    assert relative_rms(paged, exact) > 2e-2


def add_scales(folder: Path) -> Path:
    """Write _SCALES into the model's file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer, scales in enumerate(_SCALES):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(scales.key)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([scales.value])
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


async def test_whole_sequences_with_the_checkpoint_s_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a worker: chunks, decoded tokens, shared batches."""
    folder = add_scales(save_model(llama(), tmp_path))
    assert set_up(folder, "fp8_e4m3")[1].scales == tuple(
        KvScales(*torch.tensor([scales.key, scales.value]).tolist()) for scales in _SCALES
    )
    draw = torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(VOCAB_SIZE, (length,), generator=draw).tolist() for length in (1, 4, 9, 30)
    ]
    async with served_model(folder, kv_cache_dtype="fp8_e4m3", swap_space="1MiB") as worker:
        lane = LaneClient(worker.stub)
        hello = await lane.open()
        assert hello.kv_cache_dtype == "float8_e4m3fn"
        # 3 layers of 2 heads with 8 + 8 numbers, one byte each, 4 tokens.
        assert hello.num_host_blocks == 2**20 // (3 * 2 * 16 * 4)
        sequences = [
            Sequence(row=row, tokens=list(prompt), num_prompt_tokens=len(prompt))
            for row, prompt in enumerate(prompts)
        ]
        await Driver(lane).run(sequences, _NUM_TOKENS)
    reference = Reference(folder)
    exact = [reference.generate(prompt, _NUM_TOKENS) for prompt in prompts]
    round_in_transformers("llama", _SCALES, torch.float8_e4m3fn, monkeypatch)
    expected = [reference.generate(prompt, _NUM_TOKENS) for prompt in prompts]
    assert [s.tokens[s.num_prompt_tokens :] for s in sequences] == expected
    assert expected != exact


def test_a_checkpoint_without_scales_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    eager = modeling_llama.eager_attention_forward

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any):
        seen.append((float(key.abs().max()), float(value.abs().max())))
        return eager(module, query, key, value, *args, **kw)

    monkeypatch.setattr(cache_setup, "_SCALE_TOKENS", 40)
    monkeypatch.setattr(cache_setup, "_SCALE_ROWS", 1)
    folder = save_model(llama(), tmp_path)
    _, cache = set_up(folder, "fp8_e4m3", max_num_batched_tokens=40, max_num_seqs=1)
    tokens = largest_batch(40, 1, 96, BLOCK_SIZE, VOCAB_SIZE).inputs.input_ids
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)
    with torch.inference_mode():
        reference(torch.from_numpy(tokens).unsqueeze(0))
    for scales, (key, value) in zip(cache.scales, seen, strict=True):
        assert scales.key == pytest.approx(key / 448, rel=1e-5)
        assert scales.value == pytest.approx(value / 448, rel=1e-5)


def test_scales_do_not_depend_on_the_sizes_of_steps(tmp_path: Path) -> None:
    """A sequence may continue on a worker whose steps are smaller."""
    folder = save_model(llama(), tmp_path)
    _, cache = set_up(folder, "fp8_e4m3")
    _, other = set_up(folder, "fp8_e4m3", max_num_batched_tokens=16, max_num_seqs=2)
    assert other.scales == cache.scales


def test_blocks_of_8_bits_are_swapped_and_copied_as_they_are() -> None:
    layers = (
        AttentionSpec(2, 8, 4, torch.float8_e5m2),
        AttentionSpec(1, 16, 16, torch.float8_e5m2),
    )
    pool = KvPool(layers, PoolSize(5, 3), BLOCK_SIZE, _CPU)
    caches = [cache.view(torch.uint8) for pair in pool.layers for cache in pair]
    for cache in caches:
        cache.copy_(torch.randint(256, cache.shape, dtype=torch.uint8))
    before = [cache.clone() for cache in caches]
    none = BlockMoves(np.empty(0, np.int64), np.empty(0, np.int64))
    pool.move(BlockMoves(np.array([1, 4]), np.array([2, 0])), none, none)
    pool.move(none, BlockMoves(np.array([0, 2]), np.array([2, 3])), none)
    pool.move(none, none, BlockMoves(np.array([3]), np.array([4])))
    for was, cache in zip(before, caches, strict=True):
        assert cache.equal(was[[0, 1, 4, 1, 1]])


def test_a_cache_of_the_model_s_own_dtype_needs_no_scales(tmp_path: Path) -> None:
    """And no run: the model would not be there to be run."""
    folder = save_model(llama(), tmp_path)
    model = load_model(str(folder), None, "bfloat16", _CPU, None)
    model.network.forward = None
    cache = set_up_cache(model, worker_settings(folder), choose("cpu", ()), None, None)
    assert {layer.dtype for layer in cache.layers} == {torch.bfloat16}
    assert cache.scales == (KvScales(),) * 3

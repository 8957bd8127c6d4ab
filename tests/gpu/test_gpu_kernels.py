"""The kernels of a GPU against their references, which run on the processor on the same numbers."""

from dataclasses import replace

import pytest
import torch
from paged_cases import FP8, PagedCase, paged_case, relative_rms

from kernels.attention import paged_attention, paged_attention_reference
from kernels.blocks import copy_blocks, swap_blocks, swap_blocks_reference
from kernels.fused import (
    Activation,
    add_rms_norm,
    add_rms_norm_reference,
    gated_activation,
    gated_activation_reference,
    qk_norm_rope,
    qk_norm_rope_reference,
    rms_norm,
    rms_norm_reference,
    rope,
)
from kernels.inputs.tiled_weight import TiledWeight
from kernels.kv_write import kv_write, kv_write_reference
from kernels.quantized import Bits, quantize
from kernels.sampling import (
    NO_TOKEN,
    SamplingTensors,
    gumbel_noise,
    keep_most_likely,
    sample,
    sample_reference,
    token_logprobs,
    token_logprobs_reference,
)
from kernels.tiled_linear import tiled_linear, tiled_linear_reference

# Hundreds of tests, which need not be collected.
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
_FUSED_TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_CACHES = [*((dtype, dtype) for dtype in _FLOATS), *((torch.bfloat16, fp8) for fp8 in FP8)]
_HEADS = [(4, 4), (8, 2), (5, 1), (32, 8)]
_HEAD_DIMS = [64, 80, 96, 128, 256]
# Queries and sequences: decoding rows, whole prompts, pieces, nothing, exact blocks.
_MIXED = ([1, 1, 7, 33, 0, 16], [1, 129, 100, 33, 5, 64])
_DECODE = ([1] * 5, [1, 63, 100, 129, 1025])
_SAMPLED_MARGIN = 1e-4


def on(device: torch.device, case: PagedCase) -> PagedCase:
    batch = case.batch
    return replace(
        case,
        query=case.query.to(device),
        k_cache=case.k_cache.to(device),
        v_cache=case.v_cache.to(device),
        batch=replace(
            batch,
            block_table=batch.block_table.to(device),
            query_start_loc=batch.query_start_loc.to(device),
            seq_lens=batch.seq_lens.to(device),
        ),
    )


def check_attention(device: torch.device, case: PagedCase, **features: object) -> None:
    there = on(device, case)
    scale = case.query.shape[-1] ** -0.5
    out = torch.full((*case.query.shape[:2], case.v_cache.shape[-1]), torch.nan)
    expected = paged_attention_reference(
        case.query, case.k_cache, case.v_cache, case.batch, scale=scale, **features
    )
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in features.items()}
    actual = paged_attention(
        there.query,
        there.k_cache,
        there.v_cache,
        there.batch,
        scale=scale,
        out=out.to(device, case.query.dtype),
        **moved,
    )
    assert relative_rms(actual.cpu(), expected) < _TOLERANCES[case.query.dtype]


@pytest.mark.parametrize(("dtype", "cache_dtype"), _CACHES)
@pytest.mark.parametrize("block_size", [8, 16, 256])
@pytest.mark.parametrize("lengths", [_MIXED, _DECODE], ids=["mixed", "decode"])
def test_attention_of_all_types(
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    lengths: tuple[list[int], list[int]],
) -> None:
    case = paged_case(*lengths, block_size, heads=(8, 2), head_dim=64)
    check_attention(device, case.to(dtype, cache_dtype))


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("heads", _HEADS)
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_attention_of_all_heads(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    check_attention(device, paged_case(*_MIXED, 16, heads=heads, head_dim=head_dim).to(dtype))


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("sliding_window", [None, 4, 64])
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_of_all_features(
    device: torch.device,
    dtype: torch.dtype,
    sliding_window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    check_attention(
        device,
        paged_case(*_MIXED, 16, heads=(8, 2), head_dim=64).to(dtype),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=torch.randn(8) if sinks else None,
    )


@pytest.mark.parametrize(("dtype", "cache_dtype"), _CACHES)
@pytest.mark.parametrize("num_tokens", [1, 63, 1000])
def test_writes(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, num_tokens: int
) -> None:
    key, value = torch.randn(2, num_tokens, 3, 80).to(dtype)
    caches = torch.randn(2, 70, 16, 3, 80).to(cache_dtype)
    slots = torch.randperm(70 * 16)[:num_tokens]
    slots[::5] = -1
    there = caches.to(device)
    kv_write_reference(key, value, caches[0], caches[1], slots)
    kv_write(key.to(device), value.to(device), there[0], there[1], slots.to(device))
    assert there.cpu().view(torch.uint8).equal(caches.view(torch.uint8))


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 100, 2048])
@pytest.mark.parametrize("size", [(4096, 4096), (1000, 2048), (129, 480)], ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size", "integers"),
    [
        (8, None, True),
        (8, None, False),
        (8, 16, False),
        (8, 32, False),
        (4, 16, False),
        (4, 32, False),
        (4, 96, False),
        (4, None, False),
    ],
)
def test_products(
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    size: tuple[int, int],
    bits: Bits,
    group_size: int | None,
    integers: bool,
) -> None:
    """Against the reference; and those of each row alone."""
    if group_size is not None and size[1] % group_size:
        pytest.skip(f"groups of {group_size} do not divide {size[1]} inputs")
    weight = replace(quantize(torch.randn(size), bits, group_size), int8_activations=integers)
    tiled, bias = TiledWeight.of(weight, dtype), torch.randn(size[0])
    states = torch.randn(num_rows, size[1]).to(dtype)
    expected = tiled_linear_reference(states, tiled, bias)
    there = tiled.to(device)
    actual = tiled_linear(states.to(device), there, bias.to(device))
    assert relative_rms(actual.cpu(), expected) < _TOLERANCES[dtype]
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = tiled_linear(states[row : row + 1].to(device), there, bias.to(device))
        assert alone.equal(actual[row : row + 1])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a rounding of the largest number."""
    bound = _FUSED_TOLERANCES[expected.dtype] * float(expected.float().abs().max())
    torch.testing.assert_close(actual.cpu().float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("num_rows", [1, 16, 100, 2048])
@pytest.mark.parametrize("dim", [1000, 1024, 2560, 4096, 5120, 8192, 16_384])
def test_fused_norms(device: torch.device, dtype: torch.dtype, num_rows: int, dim: int) -> None:
    """Against the reference; and those of each row alone."""
    states, added = (torch.randn(2, num_rows, dim) * 3).to(dtype)
    weight = torch.randn(dim)
    there = (states.to(device), added.to(device), weight.to(device))
    total, normed = add_rms_norm(*there, 1e-6)
    expected = add_rms_norm_reference(states, added, weight, 1e-6)
    assert total.cpu().equal(expected[0])
    assert_close(normed, expected[1])
    assert_close(rms_norm(there[0], there[2], 1e-6), rms_norm_reference(states, weight, 1e-6))
    for row in {0, num_rows // 2, num_rows - 1}:
        rows = slice(row, row + 1)
        alone = add_rms_norm(there[0][rows], there[1][rows], there[2], 1e-6)
        assert alone[0].equal(total[rows])
        assert alone[1].equal(normed[rows])


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("num_rows", [1, 16, 100, 2048])
@pytest.mark.parametrize("dim", [1000, 3072, 14_336])
@pytest.mark.parametrize("activation", list(Activation))
def test_fused_gates(
    device: torch.device, dtype: torch.dtype, num_rows: int, dim: int, activation: Activation
) -> None:
    gate, up = (torch.randn(num_rows, 2 * dim) * 4).to(dtype).chunk(2, -1)
    there = gate.to(device), up.to(device)
    found = gated_activation(*there, activation)
    assert_close(found, gated_activation_reference(gate, up, activation))
    joined = torch.cat(there, -1)
    assert gated_activation(*joined.chunk(2, -1), activation).equal(found)
    for row in {0, num_rows // 2, num_rows - 1}:
        rows = slice(row, row + 1)
        alone = gated_activation(there[0][rows], there[1][rows], activation)
        assert alone.equal(found[rows])


@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 16, 100, 2048])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("has_norms", [False, True])
def test_fused_heads(
    device: torch.device, dtype: torch.dtype, num_tokens: int, dim: int, has_norms: bool
) -> None:
    """Rotated heads have the reference's bits: nothing is added up."""
    heads = (torch.randn(num_tokens, 32, dim) * 3).to(dtype)
    angles = torch.randn(1, num_tokens, dim)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = torch.rand(24, dim) if has_norms else None
    expected = qk_norm_rope_reference(heads[:, :24], cosines, sines, norms, 1e-6)
    there = heads.to(device)
    moved = (cosines.to(device), sines.to(device), None if norms is None else norms.to(device))
    alone = there[-1:].clone()
    by_head = there.transpose(0, 1).unsqueeze(0)
    rotated = rope(by_head[:, :16], by_head[:, 16:24], *moved[:2])
    qk_norm_rope(there[:, :24], *moved, 1e-6)
    assert there[:, 24:].cpu().equal(heads[:, 24:])
    if has_norms:
        assert_close(there[:, :24], expected)
    else:
        assert there[:, :24].cpu().equal(expected)
        assert torch.cat(rotated, 1)[0].transpose(0, 1).cpu().equal(expected)
    last = (moved[0][:, -1:], moved[1][:, -1:], moved[2])
    qk_norm_rope(alone[:, :24], *last, 1e-6)
    assert alone.equal(there[-1:])


def test_copies_and_swaps(device: torch.device) -> None:
    on_host = [torch.randn(9, 16, 2, 64).bfloat16() for _ in range(4)]
    on_device = [torch.randn(7, 16, 2, 64).bfloat16() for _ in range(4)]
    there = [cache.to(device) for cache in on_device]
    sources, destinations = torch.tensor([6, 0, 3]), torch.tensor([1, 4, 0])
    swap_blocks(on_host, there, sources, destinations)
    swap_blocks_reference(on_host, on_device, sources, destinations)
    # A block that is source and destination is read before it is written.
    copy_blocks(there, torch.tensor([1, 2]), torch.tensor([2, 3]))
    swap_blocks_reference(on_device, on_device, torch.tensor([1, 2]), torch.tensor([2, 3]))
    swap_blocks(there, on_host, torch.tensor([5]), torch.tensor([8]))
    torch.cuda.synchronize()
    for actual, expected in zip(there, on_device, strict=True):
        assert actual.cpu().equal(expected)
    for host, expected in zip(on_host, on_device, strict=True):
        assert host[8].equal(expected[5])


def _params(num_rows: int) -> SamplingTensors:
    """All filters, alone and together, beside rows without any and greedy ones."""
    rows = torch.arange(num_rows)
    return SamplingTensors(
        temperatures=torch.linspace(0, 2, num_rows),
        top_ks=rows % 5 * 40,
        top_ps=torch.where(rows % 3 > 0, torch.linspace(0.1, 1, num_rows), 1.0),
        min_ps=torch.where(rows % 4 == 1, 0.05, 0.0),
        seeds=rows * 0x123456789ABCDEF - 5,
        positions=rows * 3,
    )


def _to(params: SamplingTensors, device: torch.device) -> SamplingTensors:
    return SamplingTensors(**{name: value.to(device) for name, value in vars(params).items()})


@pytest.mark.parametrize("vocab_size", [130, 32000, 151936])
def test_tokens_are_the_reference_s_where_there_is_a_margin(
    device: torch.device, vocab_size: int
) -> None:
    logits, params = torch.randn(48, vocab_size) * 3, _params(48)
    logits[7] = torch.nan
    expected = sample_reference(logits, params)
    tokens = sample(logits.to(device), _to(params, device)).cpu()
    assert tokens[7] == expected[7] == NO_TOKEN
    logits[7] = 0.0
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled /= params.temperatures.clamp(min=1e-9).unsqueeze(1)
    noise = gumbel_noise(params.seeds, params.positions, vocab_size)
    best = (keep_most_likely(scaled, params) + noise).topk(2).values
    clear = (best[:, 0] - best[:, 1] > _SAMPLED_MARGIN) | (params.temperatures == 0)
    # Where the last token that a filter leaves decides, another rounding may leave another.
    clear &= (params.top_ps == 1) | (params.temperatures == 0)
    clear[7] = False
    assert clear.sum() >= 10
    assert tokens[clear].equal(expected[clear])


@pytest.mark.parametrize("num_top", [0, 20])
def test_log_probabilities(device: torch.device, num_top: int) -> None:
    logits, tokens = torch.randn(33, 32000) * 3, torch.randint(0, 32000, (33,))
    expected = token_logprobs_reference(logits, tokens, num_top)
    actual = token_logprobs(logits.to(device), tokens.to(device), num_top)
    assert actual.token_ids.cpu().equal(expected.token_ids)
    assert actual.ranks.cpu().equal(expected.ranks)
    assert torch.allclose(actual.logprobs.cpu(), expected.logprobs, atol=1e-4)

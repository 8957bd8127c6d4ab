"""Paged attention in Triton against the reference. Unseen numbers are NaN."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from paged_cases import FP8, PagedCase, apart, paged_case, relative_rms
from pairwise import pairwise
from triton_devices import DEVICES, skip_what_is_not_interpreted

from kernels.attention import PagedBatch, paged_attention, paged_attention_reference
from kernels.dispatch import HAS_TRITON, Implementation, interprets_triton

_SCALE = 0.2
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
E4M3, E5M2 = FP8
# Of queries, and of the numbers that are in the caches.
Formats = tuple[torch.dtype, torch.dtype]
_SINGLE: Formats = (torch.float32, torch.float32)
_HALF: Formats = (torch.float16, torch.float16)
_EIGHT_BITS: Formats = (torch.float16, E4M3)
_FORMATS = [_SINGLE, _HALF, *product((torch.float32, torch.float16), FP8)]
_MIXED_FORMATS: list[Formats] = [(torch.float32, torch.float16), (torch.float16, torch.float32)]
_ALL_FORMATS = [*_FORMATS, *_MIXED_FORMATS]

# Queries and lengths of sequences: decoded tokens, whole prompts, chunks, prompts with cached
# prefixes, rows without queries, exact multiples of a block.
_DECODE = ((1, 1, 1, 1), (1, 63, 100, 129))
_PROMPTS = ((63, 0), (63, 5))
_CHUNKS = ((20, 7), (129, 100))
_MIXED = ((1, 16, 9), (64, 64, 129))
_FACTORS: dict[str, Sequence[Any]] = {
    # The dearest first, which are in the fewest combinations then.
    "heads": [(32, 8), (4, 4), (8, 2), (5, 1), (14, 2), (16, 2)],
    "head_dim": [64, 80, 96, 128, 256, 120],
    "lengths": [_DECODE, _PROMPTS, _CHUNKS, _MIXED],
    "block_size": [8, 16, 32, 64, 128, 256],
    "dtypes": _FORMATS,
    "window": [None, 4, 64],
    "softcap": [None, 50.0],
    "sinks": [None, torch.float32, torch.float16],
    "partition_keys": [None, 64, 128],
}
_IN_BFLOAT16: dict[str, list[Any]] = {
    "dtypes": [(torch.bfloat16, cache_dtype) for cache_dtype in (torch.bfloat16, E4M3, E5M2)],
    "sinks": [None, torch.float32, torch.bfloat16],
}


@pytest.fixture(autouse=True)
def numbers_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU reads them. The interpreter takes NaN and infinity for large numbers, which a weight
    of 0 would hide, and in half precision the smallest numbers of e5m2 for 0."""
    if not (HAS_TRITON and interprets_triton()):
        return
    interpreter = import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float
    codes = torch.arange(256, dtype=torch.uint8)
    tables = {
        (source, target): codes.view(cache_dtype).to(dtype).numpy()
        for source, cache_dtype in (("fp8e4nv", E4M3), ("fp8e5", E5M2))
        for target, dtype in (("fp32", torch.float32), ("fp16", torch.float16))
    }

    def converted(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        table = tables.get((str(source), str(target)))
        return convert(numbers, source, target, rounding) if table is None else table[numbers]

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def slow(*values: Any) -> Any:
    """A parameter whose tests run in `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(values: Sequence[Any], *fast: Any) -> list[Any]:
    return [value if value in fast else slow(value) for value in values]


def but_the_first_slow(values: Sequence[Any]) -> list[Any]:
    return [values[0], *map(slow, values[1:])]


def assert_equals_the_reference(case: PagedCase, device: str, options: dict[str, Any]) -> None:
    """`options` are those of `paged_attention`."""
    skip_what_is_not_interpreted(device, case.query.dtype, case.k_cache.dtype)
    of_reference = {name: value for name, value in options.items() if name != "partition_keys"}
    expected = paged_attention_reference(
        case.query, case.k_cache, case.v_cache, case.batch, scale=_SCALE, **of_reference
    )
    assert expected.isfinite().all()
    out = attend(case, device, options)
    assert relative_rms(out, expected) < _TOLERANCES[case.query.dtype]


def attend(case: PagedCase, device: str, options: dict[str, Any]) -> torch.Tensor:
    """Triton's result, written to a tensor of NaN."""
    batch = replace(
        case.batch,
        block_table=case.batch.block_table.to(device),
        query_start_loc=case.batch.query_start_loc.to(device),
        seq_lens=case.batch.seq_lens.to(device),
    )
    on_device: dict[str, Any] = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    shape = (*case.query.shape[:2], case.v_cache.shape[3])
    out = torch.full(shape, torch.nan, dtype=case.query.dtype, device=device)
    given = paged_attention(
        case.query.to(device),
        moved(case.k_cache, device),
        moved(case.v_cache, device),
        batch,
        scale=_SCALE,
        implementation=Implementation.TRITON,
        out=out,
        **on_device,
    )
    assert given is out
    return out.cpu()


def moved(cache: torch.Tensor, device: str) -> torch.Tensor:
    """With its strides, which `to` does not keep of what lies apart."""
    if device == "cpu":
        return cache
    strides = cache.stride()
    return torch.empty_strided(cache.shape, strides, dtype=cache.dtype, device=device).copy_(cache)


def case_of(factors: dict[str, Any]) -> PagedCase:
    query_lens, seq_lens = map(list, factors["lengths"])
    case = paged_case(
        query_lens, seq_lens, factors["block_size"], factors["heads"], factors["head_dim"]
    )
    return case.to(*factors["dtypes"])


def options_of(factors: dict[str, Any]) -> dict[str, Any]:
    num_heads = factors["heads"][0]
    eight_bits = factors["dtypes"][1].itemsize == 1
    sinks = factors.get("sinks")
    return {
        "sliding_window": factors.get("window"),
        "softcap": factors.get("softcap"),
        "sinks": None if sinks is None else torch.linspace(-2, 3, num_heads).to(sinks),
        "k_scale": 0.7 if eight_bits else 1.0,
        "v_scale": 2.5 if eight_bits else 1.0,
        "partition_keys": factors.get("partition_keys"),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "factors",
    [
        factors if number % 16 == 0 else slow(factors)
        for number, factors in enumerate(pairwise(_FACTORS))
    ],
    ids=str,
)
def test_every_two_features_together(factors: dict[str, Any], device: str) -> None:
    assert_equals_the_reference(case_of(factors), device, options_of(factors))


def each_on(device: Any, values: Sequence[Any]) -> list[Any]:
    """Parameters, each with one of DEVICES."""
    return [pytest.param(value, *device.values, marks=device.marks) for value in values]


_SIZES: dict[str, Sequence[Any]] = {
    "heads": [(32, 8), (4, 4), (8, 2), (5, 1)],
    "head_dim": [256, 64, 80, 96, 128],
    "block_size": [8, 16, 64, 256],
    "dtypes": _FORMATS,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "device"),
    [
        *each_on(DEVICES[0], pairwise(_SIZES)),
        *each_on(DEVICES[1], pairwise(_SIZES | {"dtypes": _FORMATS + _IN_BFLOAT16["dtypes"]})),
    ],
    ids=str,
)
def test_every_feature_with_every_other(sizes: dict[str, Any], device: str) -> None:
    lengths = ((1, 63, 1, 0, 7, 1, 16), (1, 63, 129, 5, 128, 63, 64))
    case = case_of(sizes | {"lengths": lengths})
    features = {name: _FACTORS[name] for name in ("window", "softcap")}
    features |= {"sinks": [None, torch.float32], "partition_keys": [None, 64]}
    for chosen in pairwise(features):
        assert_equals_the_reference(case, device, options_of(sizes | chosen))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("factors", pairwise(_FACTORS | _IN_BFLOAT16), ids=str)
def test_every_two_features_together_in_bfloat16(factors: dict[str, Any]) -> None:
    assert_equals_the_reference(case_of(factors), "cuda", options_of(factors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 5])
def test_blocks_of_odd_sizes(block_size: int, device: str) -> None:
    assert_equals_the_reference(paged_case([1, 33], [70, 50], block_size), device, {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [(12, 7), (7, 33), (72, 88), slow(192, 128), slow(1, 1), slow(88, 72), slow(128, 192)],
)
@pytest.mark.parametrize("dtypes", mostly_slow(_ALL_FORMATS, _SINGLE, _EIGHT_BITS), ids=str)
def test_heads_of_odd_sizes(dtypes: Formats, head_dim: int, v_head_dim: int, device: str) -> None:
    case = paged_case([1, 20], [70, 50], 8, (6, 2), head_dim, v_head_dim).to(*dtypes)
    assert_equals_the_reference(case, device, {"partition_keys": 32})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group_size", [2, 7, 8, *map(slow, (3, 9, 16, 40, 71, 128, 150))])
def test_one_key_head_for_many(group_size: int, device: str) -> None:
    case = paged_case([1, 2, 5], [77, 90, 50], 16, (group_size, 1), 64)
    assert_equals_the_reference(case, device, {"partition_keys": 64})
    assert_equals_the_reference(case.to(torch.float16), device, {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("partition_keys", [63, *map(slow, (None, 17, 64, 128, 1000))])
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 50}, slow({"sinks": torch.linspace(-1, 4, 4)}), slow({})],
    ids=["window", "sinks", ""],
)
def test_lengths_at_the_edges_of_partitions(
    options: dict[str, Any], partition_keys: int | None, device: str
) -> None:
    lengths = [length for edge in (64, 128) for length in (edge - 1, edge, edge + 1)]
    case = paged_case([1, 2, 1, 1, 1, 2], lengths, 16, (4, 2), 64)
    assert_equals_the_reference(case, device, options | {"partition_keys": partition_keys})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "factors",
    but_the_first_slow(
        pairwise({"window": [64, None], "partition_keys": [64, None], "dtypes": _FORMATS[::-1]})
    ),
    ids=str,
)
def test_lengths_at_the_edges_of_the_largest_blocks(factors: dict[str, Any], device: str) -> None:
    lengths = ((1, 256, 1, 40, 130), (255, 256, 257, 512, 600))
    sizes = {"heads": (4, 1), "head_dim": 64, "block_size": 256, "lengths": lengths}
    assert_equals_the_reference(case_of(sizes | factors), device, options_of(sizes | factors))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_few_long_sequences_are_partitioned_by_itself(device: str) -> None:
    assert_equals_the_reference(paged_case([1, 1], [1300, 40], 16, (4, 2), 64), device, {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "factors",
    but_the_first_slow(
        pairwise(
            {
                "window": [800, None],
                "sinks": [torch.float32, None],
                "softcap": [None, 50.0],
                "dtypes": [_SINGLE, _HALF],
            }
        )
    ),
    ids=str,
)
def test_more_parts_than_are_merged_at_once(factors: dict[str, Any], device: str) -> None:
    # A part has no less than a tile, which has 32 or 64 keys; 16 parts are merged in one pass.
    of_parts = {"lengths": ((1, 3), (700, 1100)), "partition_keys": 32}
    sizes = {"heads": (2, 1), "head_dim": 64, "block_size": 16, **of_parts}
    assert_equals_the_reference(case_of(sizes | factors), device, options_of(sizes | factors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [*FP8, slow(torch.float16)])
def test_every_number_of_a_format_is_read_right(cache_dtype: torch.dtype, device: str) -> None:
    # Attention to one key is its value.
    size = cache_dtype.itemsize
    bits = torch.arange(256**size).to(torch.uint8 if size == 1 else torch.uint16)
    values = bits.view(cache_dtype).float()
    values = values.where(values.isfinite(), 0.0).to(cache_dtype).view(-1, 1, 1, 256)
    num_seqs = len(values)
    batch = PagedBatch(
        torch.arange(num_seqs, dtype=torch.int32).unsqueeze(1),
        torch.arange(num_seqs + 1),
        torch.ones(num_seqs, dtype=torch.int64),
        block_size=1,
    )
    keys = torch.ones(num_seqs, 1, 1, 1).to(cache_dtype)
    out = attend(PagedCase(torch.ones(num_seqs, 1, 1), keys, values, batch), device, {})
    assert torch.equal(out, values.float().view_as(out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [64, slow(None)])
def test_whole_prompts(window: int | None, device: str) -> None:
    case = paged_case([1, 100, 129, 200], [1, 100, 129, 200], 16, (4, 2), 64)
    assert_equals_the_reference(case.to(torch.float16), device, {"sliding_window": window})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("partition_keys", [16, slow(None)])
@pytest.mark.parametrize("window", [20, *map(slow, (4, 64))])
@pytest.mark.parametrize("dtypes", mostly_slow(_FORMATS, _EIGHT_BITS), ids=str)
def test_blocks_outside_the_window_are_not_read(
    dtypes: Formats, window: int, partition_keys: int | None, device: str
) -> None:
    case = paged_case([1, 30, 1, 5], [200, 200, 64, 21], 8, (4, 2), 64)
    query_lens = case.batch.query_lens.tolist()
    for seq, seq_len in enumerate(case.batch.seq_lens.tolist()):
        first_seen = max(seq_len - query_lens[seq] + 1 - window, 0)
        for position in range(first_seen):
            block = case.batch.block_table[seq, position // 8]
            case.k_cache[block, position % 8] = torch.nan
            case.v_cache[block, position % 8] = torch.nan
    options = {"sliding_window": window, "partition_keys": partition_keys}
    assert_equals_the_reference(case.to(*dtypes), device, options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [64, *map(slow, (None, 4))])
@pytest.mark.parametrize("dtypes", mostly_slow(_ALL_FORMATS, _MIXED_FORMATS[1]), ids=str)
def test_sequences_share_the_blocks_of_a_prefix(
    dtypes: Formats, window: int | None, device: str
) -> None:
    case = paged_case([4, 1, 60], [100, 90, 124], 16, (4, 2), 64)
    case.batch.block_table[1:, :4] = case.batch.block_table[0, :4]
    for partition_keys in (None, 64):
        options = {"sliding_window": window, "partition_keys": partition_keys}
        assert_equals_the_reference(case.to(*dtypes), device, options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "factors",
    but_the_first_slow(
        pairwise(
            {
                "window": [4, 64],
                "partition_keys": [16, None],
                "sinks": [None, torch.float32],
                "dtypes": _FORMATS[::-1],
            }
        )
    ),
    ids=str,
)
def test_rows_that_see_nothing_of_the_first_tile(factors: dict[str, Any], device: str) -> None:
    """The last queries of a tile begin to see keys after its first ones: of many tokens, and of a
    few, whole and in parts, of which some have nothing."""
    lengths = ((200, 16, 1), (300, 76, 9))
    sizes = {"heads": (2, 2), "head_dim": 64, "block_size": 16, "lengths": lengths}
    assert_equals_the_reference(case_of(sizes | factors), device, options_of(sizes | factors))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks", [torch.linspace(-2, 3, 4), slow(None)], ids=["sinks", ""])
@pytest.mark.parametrize("window", [64, *map(slow, (None, 4))])
def test_empty_sequences_beside_partitioned_ones(
    window: int | None, sinks: torch.Tensor | None, device: str
) -> None:
    case = paged_case([1, 1, 0, 100, 3], [300, 0, 0, 100, 0], 16, (4, 2), 64)
    options = {"sliding_window": window, "sinks": sinks, "partition_keys": 64}
    assert_equals_the_reference(case, device, options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("partition_keys", [16, slow(None)])
def test_a_query_that_sees_nothing_gets_zeros(partition_keys: int | None, device: str) -> None:
    case = paged_case([1, 1, 2, 30, 3], [5, 0, 0, 0, 9], 8, (4, 2), 64)
    for sinks in (None, torch.zeros(4)):
        options = {"sinks": sinks, "partition_keys": partition_keys}
        out = attend(case, device, options)
        assert not out[1:34].any()
        assert out[0].all()
        assert out[34:].all()
        assert_equals_the_reference(case, device, options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_without_queries(device: str) -> None:
    assert attend(paged_case([0, 0], [5, 0], 8), device, {}).shape == (0, 6, 12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_len", [1, 20])
def test_what_is_not_a_number_is_not_hidden(query_len: int, device: str) -> None:
    case = paged_case([query_len], [50], 8, (4, 2), 64)
    query = case.query.clone()
    query[-1, 0] = torch.nan
    out = attend(replace(case, query=query), device, {})
    assert out[-1, 0].isnan().all()
    assert out[-1, 1:].isfinite().all()
    assert out[:-1].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_as_models_give_them(device: str) -> None:
    """Heads before tokens in memory; numbers of a head apart from each other."""
    case = paged_case([3, 1], [30, 9], 4)
    for axes in ((1, 0, 2), (0, 2, 1)):
        query = case.query.permute(axes).contiguous().permute(axes)
        assert_equals_the_reference(replace(case, query=query), device, {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("partition_keys", [None, 64])
@pytest.mark.parametrize("dtypes", mostly_slow(_ALL_FORMATS, *_MIXED_FORMATS, _EIGHT_BITS), ids=str)
def test_caches_are_views_of_larger_ones(
    dtypes: Formats, partition_keys: int | None, device: str
) -> None:
    case = paged_case([1, 20], [100, 50], 16, (4, 2), 64).to(*dtypes)
    views = replace(case, k_cache=apart(case.k_cache), v_cache=apart(case.v_cache))
    assert_equals_the_reference(views, device, {"partition_keys": partition_keys})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_scores_of_any_size(scale: float, device: str) -> None:
    case = paged_case([1, 40], [100, 40], 8, (4, 2), 64)
    assert_equals_the_reference(replace(case, query=case.query * scale), device, {})


def with_bounds(batch: PagedBatch, max_query_len: int, max_seq_len: int) -> PagedBatch:
    return replace(batch, max_query_len=max_query_len, max_seq_len=max_seq_len)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("max_query_len", "max_seq_len", "partition_keys"),
    [(1, 200, 32), slow(1, 100, 32), slow(1, 3000, None), slow(99, 5000, None)],
)
def test_bounds_need_not_be_reached(
    max_query_len: int, max_seq_len: int, partition_keys: int | None, device: str
) -> None:
    """As in a graph that was captured for longer sequences and more rows: padding rows have a
    token and length 0."""
    case = paged_case([1, 1, 1, 1], [77, 100, 0, 0], 16, (4, 2), 64)
    expected = attend(case, device, {})
    bounded = replace(case, batch=with_bounds(case.batch, max_query_len, max_seq_len))
    out = attend(bounded, device, {"partition_keys": partition_keys})
    assert relative_rms(out[:2], expected[:2]) < 1e-5
    assert not out[2:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_no_sequence_are_left_alone(device: str) -> None:
    case = paged_case([1, 40], [70, 50], 16, (8, 2), 64)
    expected = attend(case, device, {})
    padded = replace(case, query=torch.cat([case.query, torch.ones(7, 8, 64)]))
    out = attend(padded, device, {})
    assert torch.equal(out[:41], expected)
    assert out[41:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_graph_serves_other_lengths() -> None:
    """Captured with bounds that are not reached, replayed for other lengths and a padding row."""
    case = paged_case([1, 1, 1, 1], [300, 100, 77, 16], 16, (8, 2), 64).to(torch.bfloat16)
    query, k_cache, v_cache = (
        tensor.to("cuda") for tensor in (case.query, case.k_cache, case.v_cache)
    )
    batch = PagedBatch(
        case.batch.block_table.to("cuda"),
        case.batch.query_start_loc.to("cuda"),
        case.batch.seq_lens.to("cuda"),
        block_size=16,
        max_query_len=1,
        max_seq_len=4096,
    )
    out = torch.full_like(query, torch.nan)

    def attend_on_device() -> None:
        paged_attention(
            query,
            k_cache,
            v_cache,
            batch,
            scale=_SCALE,
            implementation=Implementation.TRITON,
            out=out,
        )

    attend_on_device()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_on_device()
    shorter = replace(case.batch, seq_lens=torch.tensor([257, 1, 64, 0]))
    batch.seq_lens.copy_(shorter.seq_lens)
    query.copy_(case.query.flip(0))
    out.fill_(torch.nan)
    graph.replay()
    expected = paged_attention_reference(
        case.query.flip(0), case.k_cache, case.v_cache, shorter, scale=_SCALE
    )
    assert relative_rms(out.cpu(), expected) < _TOLERANCES[torch.bfloat16]
    assert not out[3].any()

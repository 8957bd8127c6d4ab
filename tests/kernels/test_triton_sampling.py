"""Sampling in Triton against its reference: the same random bits, tokens and ranks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from sampling_cases import has_margin, mixed_params, params
from torch import Tensor
from triton_devices import DEVICES

from kernels.dispatch import Implementation
from kernels.philox import random_words
from kernels.sampling import (
    NO_TOKEN,
    SamplingTensors,
    TokenLogprobs,
    sample,
    sample_reference,
    token_logprobs,
    token_logprobs_reference,
)

triton = pytest.importorskip("triton")
from kernels.gpu import sampling as triton_sampling  # noqa: E402
from kernels.gpu.logprobs import MAX_TOP  # noqa: E402
from kernels.gpu.philox import random_words as random_words_triton  # noqa: E402

tl = triton.language

_INF = float("inf")
TRITON = Implementation.TRITON


slow = pytest.mark.slow
# Runs that a GPU alone can do.
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
Draw = Callable[[Tensor, SamplingTensors], Tensor]
Logprobs = Callable[[Tensor, Tensor, int], TokenLogprobs]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def draw(device: str) -> Draw:
    """Sample there, from logits of the host to tokens of the host."""

    def run(logits: Tensor, drawing: SamplingTensors) -> Tensor:
        found = sample(logits.to(device), on(drawing, device), implementation=TRITON)
        return found.cpu()

    return run


@pytest.fixture
def logprobs(device: str) -> Logprobs:
    def run(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
        arguments = logits.to(device), token_ids.to(device), num_top
        found = token_logprobs(*arguments, implementation=TRITON)
        return TokenLogprobs(*(getattr(found, name).cpu() for name in vars(found)))

    return run


def on(drawing: SamplingTensors, device: str) -> SamplingTensors:
    return SamplingTensors(*(getattr(drawing, name).to(device) for name in vars(drawing)))


def assert_tokens_are_the_reference_s(
    draw: Draw, logits: Tensor, drawing: SamplingTensors, fewest_clear: int | None = None
) -> None:
    """Wherever rounding cannot change them, which is so in nearly all rows."""
    tokens, expected = draw(logits, drawing), sample_reference(logits.float(), drawing)
    clear = torch.ones(len(logits), dtype=torch.bool)
    if logits.shape[1] > 1:
        clear = has_margin(logits.float(), drawing) | (expected == NO_TOKEN)
    assert clear.sum() >= (len(logits) * 2 // 3 if fewest_clear is None else fewest_clear)
    assert tokens[clear].equal(expected[clear])


@triton.jit
def _words_kernel(seeds, positions, out, num_words, COUNTERS: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    words = random_words_triton(tl.load(seeds + row), tl.load(positions + row), 0, COUNTERS)
    word = tl.arange(0, 4 * COUNTERS)
    tl.store(out + row * num_words + word, words.to(tl.int64), mask=word < num_words)


def test_random_bits_are_the_same(device: str) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    positions = torch.tensor([0, 1, 2**31 - 1, 77, 4095, 131_071])
    for num_words in (1, 3, 63, 1003):
        out = torch.empty(6, num_words, dtype=torch.int64, device=device)
        _words_kernel[(6,)](seeds.to(device), positions.to(device), out, num_words, COUNTERS=256)
        assert out.cpu().equal(random_words(seeds, positions, num_words))


@pytest.mark.parametrize(
    ("vocab_size", "spread", "num_rows"),
    [
        *((1, 1.0, 12), (2, 1.0, 12), (63, 0.1, 15), (1000, 1.0, 15)),
        *(
            pytest.param(*sizes, marks=slow)
            for sizes in (
                *((100, 8.0, 15), (129, 1.0, 15), (1000, 8.0, 15), (2049, 0.1, 6)),
                *((8192, 3.0, 6), (8192, 0.1, 6), (32_000, 3.0, 24), (50_257, 3.0, 9)),
            )
        ),
    ],
)
def test_every_token_is_the_reference_s(
    draw: Draw, vocab_size: int, spread: float, num_rows: int
) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size) * spread
    assert_tokens_are_the_reference_s(draw, logits, mixed_params(num_rows))


def test_every_token_is_the_reference_s_with_masked_and_equal_logits(draw: Draw) -> None:
    torch.manual_seed(1)
    # Halves, so that most logits have equals; nine of ten tokens are masked.
    logits = (torch.randn(15, 777) * 4).round() / 2
    logits[torch.rand(15, 777) < 0.9] = -_INF
    assert_tokens_are_the_reference_s(draw, logits, mixed_params(15))


def test_every_token_is_the_reference_s_with_likely_logits_in_two_tiles(draw: Draw) -> None:
    """Few enough to be collected, most of them of the second tile, and filters that often refuse
    the first winner."""
    torch.manual_seed(0)
    logits = torch.randn(6, 5000)
    logits[:, :4096][torch.rand(6, 4096) < 0.99] = -_INF
    logits[:, 4096:][torch.rand(6, 904) < 0.9] = -_INF
    drawing = params(
        6,
        temperatures=2.0,
        top_ks=torch.tensor([20, 40, 40, 9, 0, 0]),
        top_ps=torch.tensor([1.0, 0.8, 0.5, 0.6, 0.4, 0.7]),
        seeds=torch.arange(6),
    )
    assert_tokens_are_the_reference_s(draw, logits, drawing)


@pytest.mark.parametrize(
    "temperature", [0.7, *(pytest.param(extreme, marks=slow) for extreme in (1e-30, 50.0))]
)
def test_filters_at_their_edges(draw: Draw, temperature: float) -> None:
    torch.manual_seed(2)
    vocab_size = 100
    edges = list(
        product(
            (0, 1, 2, vocab_size - 1, vocab_size, 2**40),
            (0.0, 1e-7, 0.5, 1 - 2.0**-24, 1.0),
            (0.0, 0.3, 1.0),
        )
    )[int(temperature) % 4 :: 4]
    top_ks, top_ps, min_ps = zip(*edges, strict=True)
    seeds = torch.arange(len(edges))
    drawing = params(
        len(edges),
        temperatures=temperature,
        top_ks=torch.tensor(top_ks),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
        seeds=seeds,
    )
    logits = (torch.randn(len(edges), vocab_size) * 6).round() / 2
    assert_tokens_are_the_reference_s(draw, logits, drawing, fewest_clear=len(edges) // 2)


# The interpreter's: the largest float minus the smallest.
@pytest.mark.filterwarnings("ignore:overflow encountered in subtract")
@pytest.mark.parametrize("top_p", [0.9, pytest.param(1.0, marks=slow)])
def test_top_k_is_exact_wherever_logits_lie(draw: Draw, top_p: float) -> None:
    """Logits that no equidistant steps distinguish: near each other, and far."""
    powers = -(2.0 ** torch.arange(-60, 60, dtype=torch.float32))
    neighbours = (torch.tensor(1.0).view(torch.int32) + torch.arange(120)).int().view(torch.float32)
    extremes = torch.cat([torch.tensor([3e38, -3e38, -3.3e38, 1e-45, -1e-45]), powers[:115]])
    logits = torch.stack([powers, neighbours, extremes, -neighbours * 1e30]).repeat(4, 1)
    top_ks = torch.tensor([1, 3, 50, 119]).repeat_interleave(4)
    drawing = params(16, top_ks=top_ks, top_ps=top_p, seeds=torch.arange(16))
    assert_tokens_are_the_reference_s(draw, logits, drawing, fewest_clear=8)


def test_rows_that_allow_no_token_have_none(draw: Draw) -> None:
    logits = torch.zeros(5, 1030)
    logits[0, 1029] = float("nan")
    logits[1, 3] = _INF
    logits[2] = -_INF
    logits[3] = -_INF
    logits[3, 128] = -1e30
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5)):
        tokens = draw(logits, params(5, temperatures=temperature, top_ps=top_p, top_ks=40))
        assert tokens[:4].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 128]
        assert tokens[4] != NO_TOKEN


def test_greedy_and_tiny_temperatures_take_the_largest(draw: Draw) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 1050) * 30
    logits[0, [77, 150, 1049]] = 200.0
    for temperature in (0.0, 1e-30, 1e-6):
        tokens = draw(logits[1:], params(3, temperatures=temperature))
        assert tokens.equal(logits[1:].argmax(-1))
    assert draw(logits[:1], params(1, temperatures=0.0)).tolist() == [77]


@pytest.mark.parametrize("splits", [2, pytest.param(1, marks=slow)])
def test_a_row_depends_neither_on_its_batch_nor_on_how_it_is_cut(
    draw: Draw, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    logits, drawing = torch.randn(6, 2100), mixed_params(6)
    together = draw(logits, drawing)
    monkeypatch.setattr(triton_sampling, "num_splits", lambda num_rows, vocab_size: splits)
    alone = draw(logits[[4]], drawing.of(torch.tensor([4])))
    assert alone == together[4]
    order = torch.randperm(6)
    assert draw(logits[order], drawing.of(order)).equal(together[order])


def test_splits_cover_a_row_and_none_is_empty() -> None:
    for num_rows, vocab_size in product((1, 3, 100, 511, 10_000), (1, 1024, 1025, 32_000, 300_000)):
        splits = triton_sampling.num_splits(num_rows, vocab_size)
        blocks = -(-vocab_size // 1024)
        blocks_of_split = -(-blocks // splits)
        assert 1 <= splits <= 64
        assert (splits - 1) * blocks_of_split < blocks <= splits * blocks_of_split


def test_logits_may_be_rows_of_a_wider_tensor_and_have_16_bits(draw: Draw) -> None:
    torch.manual_seed(0)
    wide = torch.randn(6, 200).half()
    drawing = params(6, seeds=torch.arange(6), top_ps=0.8)
    assert_tokens_are_the_reference_s(draw, wide[:, 50:150], drawing)


def test_a_batch_may_have_no_rows(draw: Draw, logprobs: Logprobs) -> None:
    assert draw(torch.empty(0, 50), params(0)).shape == (0,)
    assert logprobs(torch.empty(0, 50), torch.empty(0).long(), 3).token_ids.shape == (0, 4)


def assert_same_logprobs(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert found.token_ids.equal(expected.token_ids)
    assert found.ranks.equal(expected.ranks)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        *((1, torch.float32), (1000, torch.float32)),
        *((4097, torch.float16), (9000, torch.float32)),
        *(
            pytest.param(*other, marks=slow)
            for other in (
                *((1, torch.float16), (63, torch.float32), (63, torch.float16)),
                *((1000, torch.float16), (4097, torch.float32), (9000, torch.float16)),
            )
        ),
    ],
)
def test_logprobs_and_ranks_are_the_reference_s(
    logprobs: Logprobs, vocab_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    # Halves, so that most logits have equals.
    logits = (torch.randn(4, vocab_size) * 6).round() / 2
    logits[:2, 40:] = -_INF
    chosen = torch.randint(min(40, vocab_size), (4,))
    # More than MAX_TOP the reference gives, which takes 32 bits.
    more = (MAX_TOP + 1, 300) if dtype == torch.float32 else ()
    for num_top in (0, 1, 20, MAX_TOP, *more):
        if num_top <= vocab_size:
            found = logprobs(logits.to(dtype), chosen, num_top)
            assert_same_logprobs(found, token_logprobs_reference(logits, chosen, num_top))


def test_of_equal_logits_the_lower_token_id_comes_first(logprobs: Logprobs) -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -2.0, -2.0, 1.0]])
    entries = logprobs(logits.expand(3, -1), torch.tensor([3, 4, 6]), 8)
    order = [1, 3, 0, 7, 2, 4, 5, 6]
    assert entries.token_ids.tolist() == [[chosen, *order] for chosen in (3, 4, 6)]
    assert entries.ranks[:, 0].tolist() == [2, 6, 8]


@on_a_gpu
@pytest.mark.parametrize("vocab_size", [1, 50_257, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_vocabularies(
    draw: Draw, logprobs: Logprobs, dtype: torch.dtype, vocab_size: int
) -> None:
    torch.manual_seed(vocab_size)
    logits = (torch.randn(48, vocab_size) * 3).to(dtype)
    assert_tokens_are_the_reference_s(draw, logits, mixed_params(48))
    chosen = torch.randint(vocab_size, (48,))
    found = logprobs(logits, chosen, min(20, vocab_size))
    expected = token_logprobs_reference(logits.float(), chosen, min(20, vocab_size))
    # In 32 bits torch's sum over so many tokens is less exact than the kernel's.
    exact = logits.double().log_softmax(-1).gather(1, expected.token_ids).float()
    assert_same_logprobs(found, replace(expected, logprobs=exact))


@on_a_gpu
def test_a_row_of_a_large_batch_is_what_it_is_alone(draw: Draw) -> None:
    torch.manual_seed(0)
    logits, drawing = torch.randn(700, 50_257) * 3, mixed_params(700)
    together = draw(logits, drawing)
    for row in range(0, 700, 29):
        assert draw(logits[[row]], drawing.of(torch.tensor([row]))) == together[row]


@on_a_gpu
def test_sampling_can_be_captured_into_a_graph(device: str) -> None:
    torch.manual_seed(0)
    drawing = on(mixed_params(16), device)
    logits = torch.randn(16, 50_257, device=device)
    sample(logits, drawing)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, drawing)
    for _ in range(3):
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        assert tokens.equal(sample(logits, drawing))


@on_a_gpu
def test_nothing_waits_for_the_device(device: str) -> None:
    logits, drawing = torch.randn(16, 50_257, device=device), on(mixed_params(16), device)
    chosen = torch.arange(16, device=device)
    sample(logits, drawing)
    token_logprobs(logits, chosen, 5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(logits, drawing)
        token_logprobs(logits, chosen, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""The generator against published vectors, the distribution of draws, and each implementation
against its reference."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from implementations import WITHOUT_PRODUCTS
from sampling_cases import has_margin, mixed_params, params
from torch import Tensor

from kernels.dispatch import Implementation
from kernels.philox import philox4x32
from kernels.sampling import (
    NO_TOKEN,
    SamplingTensors,
    TokenLogprobs,
    gumbel_noise,
    sample,
    sample_reference,
    token_logprobs,
)

Sample = Callable[[Tensor, SamplingTensors], Tensor]
Logprobs = Callable[[Tensor, Tensor, int], TokenLogprobs]

_ONES = 0xFFFFFFFF
_INF = float("inf")
_IMPLEMENTATIONS = (Implementation.REFERENCE, *WITHOUT_PRODUCTS)


@pytest.fixture(params=_IMPLEMENTATIONS)
def draw(request: pytest.FixtureRequest) -> Sample:
    return partial(sample, implementation=request.param)


@pytest.fixture(params=_IMPLEMENTATIONS)
def logprobs(request: pytest.FixtureRequest) -> Logprobs:
    return partial(token_logprobs, implementation=request.param)


# The known test vectors of Random123, the authors' own library.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (_ONES, _ONES, _ONES, _ONES),
            (_ONES, _ONES),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


@pytest.mark.parametrize("implementation", WITHOUT_PRODUCTS)
def test_random_bits_are_the_same_everywhere(implementation: Implementation) -> None:
    """Of equal logits the one with the largest noise is drawn."""
    torch.manual_seed(0)
    edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    seeds = torch.cat([edges, torch.randint(-(2**63), 2**63 - 1, (300,))])
    ends = torch.tensor([0, 1, 2**31 - 1, 77, 4095, 131_071])
    positions = torch.cat([ends, torch.randint(0, 2**31, (300,))])
    drawing = params(len(seeds), temperatures=1.0, seeds=seeds, positions=positions)
    for vocab_size in (1, 3, 63, 64, 65, 1003):
        tokens = sample(torch.zeros(len(seeds), vocab_size), drawing, implementation=implementation)
        assert tokens.equal(gumbel_noise(seeds, positions, vocab_size).argmax(-1))


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("varied", "temperature"), [("seeds", 0.5), ("positions", 1.0), ("seeds", 2.0)]
)
def test_draws_follow_the_softmax(draw: Sample, varied: str, temperature: float) -> None:
    logits = torch.linspace(-1.5, 1.5, 21)[torch.randperm(21)]
    num = 100_000
    drawing = params(num, temperatures=temperature, **{varied: torch.arange(num) + 1})
    counts = draw(logits.expand(num, -1), drawing).bincount(minlength=21).double()
    # 20 degrees of freedom: 59 is exceeded once in a hundred thousand.
    assert chi_square(counts, (logits / temperature).softmax(-1)) < 59


@pytest.mark.parametrize(
    ("filters", "num_left"),
    [({"top_ks": 7}, 7), ({"top_ps": 0.5}, 5), ({"min_ps": 0.2}, 11)],
    ids=["top_k", "top_p", "min_p"],
)
def test_draws_follow_the_softmax_of_what_filters_leave(
    draw: Sample, filters: dict[str, float], num_left: int
) -> None:
    # More tokens than a block has, the likeliest ones in several blocks.
    logits = torch.full((130,), -4.0)
    logits[torch.arange(21) * 6 + 5] = torch.linspace(3, 0, 21)
    num = 20_000
    drawing = params(num, seeds=torch.arange(num), **filters)
    counts = draw(logits.expand(num, -1), drawing).bincount(minlength=130)
    left = counts.nonzero().squeeze(1)
    assert left.tolist() == (torch.arange(num_left) * 6 + 5).tolist()
    # With 10 degrees of freedom or fewer.
    assert chi_square(counts[left].double(), logits[left].softmax(-1)) < 43


def test_noise_has_gumbel_s_mean_and_variance() -> None:
    noise = gumbel_noise(torch.tensor([1, -1]), torch.tensor([5, 6]), 100_001).double()
    assert noise.shape == (2, 100_001)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03


def test_a_row_does_not_depend_on_its_batch(draw: Sample) -> None:
    torch.manual_seed(0)
    logits, drawing = torch.randn(32, 999), mixed_params(32)
    together = draw(logits, drawing)
    for row in range(32):
        alone = draw(logits[[row]], drawing.of(torch.tensor([row])))
        assert alone == together[row]
    order = torch.randperm(32)
    assert draw(logits[order], drawing.of(order)).equal(together[order])


@pytest.mark.parametrize("implementation", WITHOUT_PRODUCTS)
@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [
        *((1, 1.0), (2, 1.0), (63, 0.1), (64, 1.0), (65, 8.0), (129, 1.0)),
        *((1003, 0.1), (1003, 1.0), (1003, 8.0), (8192, 1.0), (50_257, 3.0)),
    ],
)
def test_every_token_is_the_reference_s(
    vocab_size: int, spread: float, implementation: Implementation
) -> None:
    torch.manual_seed(vocab_size)
    logits, drawing = torch.randn(48, vocab_size) * spread, mixed_params(48)
    tokens = sample(logits, drawing, implementation=implementation)
    expected = sample_reference(logits, drawing)
    clear = has_margin(logits, drawing) if vocab_size > 1 else torch.ones(48, dtype=torch.bool)
    assert clear.sum() >= 32
    assert tokens[clear].equal(expected[clear])


@pytest.mark.parametrize("implementation", WITHOUT_PRODUCTS)
def test_every_token_is_the_reference_s_with_masked_and_equal_logits(
    implementation: Implementation,
) -> None:
    torch.manual_seed(1)
    # Halves, so that most logits have equals; nine of ten tokens are masked.
    logits = (torch.randn(60, 777) * 4).round() / 2
    logits[torch.rand(60, 777) < 0.9] = -_INF
    drawing = mixed_params(60)
    clear = has_margin(logits, drawing)
    assert clear.sum() >= 50
    tokens = sample(logits, drawing, implementation=implementation)
    assert tokens[clear].equal(sample_reference(logits, drawing)[clear])


def test_rows_that_allow_no_token_have_none(draw: Sample) -> None:
    logits = torch.zeros(5, 130)
    logits[0, 129] = float("nan")
    logits[1, 3] = _INF
    logits[2] = -_INF
    logits[3] = -_INF
    logits[3, 128] = -1e30
    for temperature in (0.0, 1.0):
        tokens = draw(logits, params(5, temperatures=temperature))
        assert tokens[:4].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 128]
        assert tokens[4] != NO_TOKEN


def test_greedy_and_tiny_temperatures_take_the_largest(draw: Sample) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 150) * 30
    for temperature in (0.0, 1e-30, 1e-6):
        tokens = draw(logits, params(8, temperatures=temperature))
        assert tokens.equal(logits.argmax(-1))


def test_of_equal_logits_greedy_takes_the_first(draw: Sample) -> None:
    logits = torch.zeros(2, 200)
    logits[1, [77, 150, 199]] = 1.0
    assert draw(logits, params(2, temperatures=0.0)).tolist() == [0, 77]


def test_filters_bound_what_is_drawn(draw: Sample) -> None:
    probabilities = torch.tensor([0.4, 0.05, 0.3, 0.05, 0.2])
    logits = probabilities.log().expand(4000, -1)
    seeds = torch.arange(4000)
    for changes, allowed in (
        ({"top_ks": 1}, {0}),
        ({"top_ks": 2}, {0, 2}),
        # The fourth and the fifth are as likely.
        ({"top_ks": 4}, {0, 1, 2, 3, 4}),
        ({"top_ps": 1e-6}, {0}),
        ({"top_ps": 0.6}, {0, 2}),
        ({"top_ps": 0.85}, {0, 2, 4}),
        # Of the two that top_k leaves, the first alone has 0.57.
        ({"top_ks": 2, "top_ps": 0.5}, {0}),
        ({"top_ks": 999}, {0, 1, 2, 3, 4}),
        ({"min_ps": 1.0}, {0}),
        ({"min_ps": 0.6}, {0, 2}),
        ({"min_ps": 0.1}, {0, 1, 2, 3, 4}),
        # Each bounds what the other leaves.
        ({"min_ps": 0.4, "top_ks": 2}, {0, 2}),
        ({"min_ps": 0.6, "top_ps": 0.85}, {0, 2}),
    ):
        drawn = draw(logits, params(4000, seeds=seeds, **changes))
        assert set(drawn.tolist()) == allowed, changes


def test_logits_may_be_rows_of_a_wider_tensor(draw: Sample) -> None:
    torch.manual_seed(0)
    wide = torch.randn(6, 200)
    drawing = params(6, seeds=torch.arange(6))
    assert draw(wide[:, 50:150], drawing).equal(draw(wide[:, 50:150].clone(), drawing))


def test_logprobs_of_the_chosen_and_the_top(logprobs: Logprobs) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    entries = logprobs(logits, torch.tensor([0]), 2)
    assert entries.token_ids.tolist() == [[0, 1, 2]]
    assert entries.ranks.tolist() == [[3, 1, 2]]
    expected = logits.log_softmax(-1)[0, [0, 1, 2]]
    torch.testing.assert_close(entries.logprobs[0], expected)


def test_of_equal_logits_the_lower_token_id_comes_first(logprobs: Logprobs) -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -2.0, -2.0, 1.0]])
    entries = logprobs(logits.expand(3, -1), torch.tensor([3, 4, 6]), 8)
    order = [1, 3, 0, 7, 2, 4, 5, 6]
    assert entries.token_ids.tolist() == [[chosen, *order] for chosen in (3, 4, 6)]
    assert entries.ranks[:, 0].tolist() == [2, 6, 8]


def test_logprobs_are_ranked_as_a_stable_sort_ranks_them(logprobs: Logprobs) -> None:
    torch.manual_seed(0)
    # Halves, so that most logits have equals.
    logits = (torch.randn(17, 1003) * 6).round() / 2
    logits[:4, 100:] = -_INF
    chosen = torch.randint(1003, (17,))
    for num_top in (0, 1, 20, 300):
        entries = logprobs(logits, chosen, num_top)
        order = logits.sort(descending=True, stable=True).indices
        assert torch.equal(entries.token_ids[:, 1:], order[:, :num_top])
        assert torch.equal(entries.ranks[:, 0], (order == chosen.unsqueeze(1)).nonzero()[:, 1] + 1)
        assert torch.equal(entries.ranks[:, 1:], (torch.arange(num_top) + 1).expand(17, -1))
        expected = logits.double().log_softmax(-1).gather(1, entries.token_ids).float()
        torch.testing.assert_close(entries.logprobs, expected, atol=1e-5, rtol=0)

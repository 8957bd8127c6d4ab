"""The generator against published vectors, and what is drawn with it."""

import math

import pytest
import torch

from kernels.philox import philox4x32
from kernels.sampling import gumbel_noise, sample, token_logprobs

_ONES = 0xFFFFFFFF


# The known-answer vectors of Random123, the authors' own library.
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
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def draw(logits: torch.Tensor, **changes: object) -> torch.Tensor:
    """Samples each row; a parameter may be one value for all rows."""
    rows = logits.shape[0]
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "position": 0, **changes}
    dtypes = (torch.float32, torch.int64, torch.float32, torch.int64, torch.int64)
    params = [
        torch.as_tensor(value, dtype=dtype).expand(rows)
        for value, dtype in zip(values.values(), dtypes, strict=True)
    ]
    return sample(logits, *params)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(varied: str, temperature: float) -> None:
    logits = torch.linspace(-1.5, 1.5, 21)[torch.randperm(21)]
    num = 20_000
    tokens = draw(
        logits.expand(num, -1), temperature=temperature, **{varied: torch.arange(num) + 1}
    )
    counts = tokens.bincount(minlength=21).double()
    # 20 degrees of freedom: 59 is exceeded once in a hundred thousand.
    assert chi_square(counts, (logits / temperature).softmax(-1)) < 59


def test_noise_has_gumbel_s_mean_and_variance() -> None:
    noise = gumbel_noise(torch.tensor([1, -1]), torch.tensor([5, 6]), 100_001).double()
    assert noise.shape == (2, 100_001)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(32, 999)
    params = {
        "temperature": torch.linspace(0, 2, 32),
        "top_k": torch.arange(32) % 4 * 20,
        "top_p": torch.linspace(0.1, 1, 32),
        "seed": torch.arange(32) * 0x123456789ABCDEF - 5,
        "position": torch.arange(32) * 3,
    }
    together = draw(logits, **params)
    for row in range(32):
        alone = draw(logits[[row]], **{name: value[row] for name, value in params.items()})
        assert alone == together[row]


def test_greedy_and_tiny_temperatures_take_the_largest() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 50) * 30
    for temperature in (0.0, 1e-30, 1e-6):
        assert draw(logits, temperature=temperature).equal(logits.argmax(-1))


def test_top_k_and_top_p_bound_what_is_drawn() -> None:
    probabilities = torch.tensor([0.4, 0.05, 0.3, 0.05, 0.2])
    logits = probabilities.log().expand(4000, -1)
    seeds = torch.arange(4000)
    for changes, allowed in (
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 1e-6}, {0}),
        ({"top_p": 0.6}, {0, 2}),
        ({"top_p": 0.85}, {0, 2, 4}),
        # Of the two that top_k leaves, the first alone has 0.57.
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"top_k": 999}, {0, 1, 2, 3, 4}),
    ):
        assert set(draw(logits, seed=seeds, **changes).tolist()) == allowed, changes


def test_logprobs_of_the_chosen_and_the_top() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    entries = token_logprobs(logits, torch.tensor([0]), 2)
    assert entries.token_ids.tolist() == [[0, 1, 2]]
    assert entries.ranks.tolist() == [[3, 1, 2]]
    expected = logits.log_softmax(-1)[0, [0, 1, 2]]
    torch.testing.assert_close(entries.logprobs[0], expected)


def test_of_equal_logits_the_lower_token_id_comes_first() -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -2.0, -2.0, 1.0]])
    entries = token_logprobs(logits.expand(3, -1), torch.tensor([3, 4, 6]), 8)
    order = [1, 3, 0, 7, 2, 4, 5, 6]
    assert entries.token_ids.tolist() == [[chosen, *order] for chosen in (3, 4, 6)]
    assert entries.ranks[:, 0].tolist() == [2, 6, 8]


def test_logprobs_are_ranked_as_a_stable_sort_ranks_them() -> None:
    torch.manual_seed(0)
    # Halves, so that most logits have equals.
    logits = (torch.randn(17, 1003) * 6).round() / 2
    chosen = torch.randint(1003, (17,))
    entries = token_logprobs(logits, chosen, 20)
    order = logits.sort(descending=True, stable=True).indices
    assert torch.equal(entries.token_ids[:, 1:], order[:, :20])
    assert torch.equal(entries.ranks[:, 0], (order == chosen.unsqueeze(1)).nonzero()[:, 1] + 1)
    expected = logits.double().log_softmax(-1).gather(1, entries.token_ids).float()
    torch.testing.assert_close(entries.logprobs, expected, atol=1e-5, rtol=0)

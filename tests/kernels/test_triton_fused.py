"""The small operations between products in Triton, against the references."""

import pytest
import torch
from torch import Tensor
from triton_devices import DEVICES, skip_what_is_not_interpreted

from kernels.dispatch import Implementation
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
    rope_reference,
)
from kernels.gpu.fused.tiles import MOST_NORM_NUMBERS

TRITON = Implementation.TRITON
pytestmark = pytest.mark.parametrize("device", DEVICES)
_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# The last bit of the result's largest number, and of sums in another order.
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_ROWS = [1, 2, 17, 65]


def assert_near(result: Tensor, expected: Tensor) -> None:
    """Within a rounding of the largest number."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    bound = _TOLERANCE[expected.dtype] * float(expected.float().abs().max())
    torch.testing.assert_close(result.float().cpu(), expected.float(), rtol=0, atol=bound)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@_DTYPES
@pytest.mark.parametrize("num_rows", _ROWS)
@pytest.mark.parametrize("dim", [1, 63, 100, 128, 1024])
def test_norms(dtype: torch.dtype, num_rows: int, dim: int, device: str) -> None:
    skip_what_is_not_interpreted(device, dtype)
    check_norms(dtype, num_rows, dim, device)


@_DTYPES
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("dim", [2560, 4096, 5120, 8191, 8192, MOST_NORM_NUMBERS])
def test_norms_of_long_rows(dtype: torch.dtype, num_rows: int, dim: int, device: str) -> None:
    skip_what_is_not_interpreted(device, dtype)
    check_norms(dtype, num_rows, dim, device)


def test_norms_of_rows_that_are_too_long(device: str) -> None:
    check_norms(torch.float32, 2, MOST_NORM_NUMBERS + 1, device)


def check_norms(dtype: torch.dtype, num_rows: int, dim: int, device: str) -> None:
    """Alone and of sums."""
    states, added = (torch.randn(2, 1, num_rows, dim) * 3).to(dtype)
    weight = torch.randn(dim)
    there = [each.to(device) for each in (states, added, weight)]
    result = rms_norm(there[0], there[2], 1e-6, implementation=TRITON)
    assert_near(result, rms_norm_reference(states, weight, 1e-6))
    total, result = add_rms_norm(*there, 1e-6, implementation=TRITON)
    expected = add_rms_norm_reference(states, added, weight, 1e-6)
    assert total.cpu().equal(expected[0])
    assert_near(result, expected[1])
    assert total.is_contiguous()
    assert result.is_contiguous()
    assert there[0].cpu().equal(states)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_norms_of_rows_that_lie_apart(num_tokens: int, device: str) -> None:
    states = torch.randn(num_tokens, 4, 66).to(device)
    weight = torch.ones(33, device=device)
    for rows in (states.transpose(0, 1)[..., :33], states[..., 33:], states[..., ::2], states[:0]):
        weight = torch.randn(rows.shape[-1])
        expected = rms_norm_reference(rows.cpu(), weight, 1e-6)
        result = rms_norm(rows, weight.to(device), 1e-6, implementation=TRITON)
        torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=1e-5)
        _, result = add_rms_norm(
            rows, torch.zeros_like(rows), weight.to(device), 1e-6, implementation=TRITON
        )
        torch.testing.assert_close(result.cpu(), expected, rtol=0, atol=1e-5)


def test_norms_of_zeros_and_of_what_is_not_finite(device: str) -> None:
    states = torch.zeros(4, 40)
    states[1, 3], states[2, 3] = torch.nan, torch.inf
    result = rms_norm(states.to(device), torch.ones(40).to(device), 1e-6, implementation=TRITON)
    expected = rms_norm_reference(states, torch.ones(40), 1e-6)
    torch.testing.assert_close(result.cpu(), expected, equal_nan=True)
    assert not result[0].any()
    assert result[1].isnan().all()


def test_sums_are_rounded_before_their_norm(device: str) -> None:
    """In float16 the second number is lost beside the first."""
    states, added = torch.full((16, 64), 2048.0).half(), torch.full((16, 64), 0.5).half()
    total, normed = add_rms_norm(
        states.to(device),
        added.to(device),
        torch.ones(64).to(device),
        0.0,
        implementation=TRITON,
    )
    assert total.cpu().equal(states)
    assert normed.cpu().equal(torch.ones(16, 64).half())


@_DTYPES
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("num_rows", _ROWS)
@pytest.mark.parametrize("dim", [1, 63, 128, 300, pytest.param(3072, marks=pytest.mark.slow)])
def test_gated_activations(
    dtype: torch.dtype, activation: Activation, num_rows: int, dim: int, device: str
) -> None:
    skip_what_is_not_interpreted(device, dtype)
    gate, up = (
        (torch.randn(1, num_rows, dim) * 4).to(dtype),
        torch.randn(1, num_rows, dim).to(dtype),
    )
    expected = gated_activation_reference(gate, up, activation)
    found = gated_activation(gate.to(device), up.to(device), activation, implementation=TRITON)
    assert_near(found, expected)
    # Both from one product.
    joined = torch.cat([gate, up], -1).to(device)
    again = gated_activation(*joined.chunk(2, -1), activation, implementation=TRITON)
    assert again.equal(found)
    assert again.is_contiguous()


@pytest.mark.parametrize("activation", list(Activation))
def test_gates_far_from_zero(activation: Activation, device: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -87.5, -0.0, 0.0, 87.5, 200.0, 1e30])
    ones = torch.ones(9, device=device)
    result = gated_activation(gate.to(device), ones, activation, implementation=TRITON)
    torch.testing.assert_close(result.cpu(), gate.clamp(min=0), rtol=1e-6, atol=1e-30)


def angles_of(num_tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(1, num_tokens, dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@_DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "heads", "dim"),
    [
        (1, (1, 1), 2),
        (1, (16, 8), 128),
        (5, (5, 1), 80),
        (17, (3, 7), 96),
        (100, (8, 4), 64),
        (3, (4, 2), 256),
        (0, (2, 1), 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens_first", [True, False])
def test_rotation(
    dtype: torch.dtype,
    num_tokens: int,
    heads: tuple[int, int],
    dim: int,
    tokens_first: bool,
    device: str,
) -> None:
    """The same bits: nothing is added up."""
    skip_what_is_not_interpreted(device, dtype)

    def states(num_heads: int) -> Tensor:
        if tokens_first:
            return torch.randn(1, num_tokens, num_heads, dim).to(dtype).transpose(1, 2)
        return torch.randn(1, num_heads, num_tokens, dim).to(dtype)

    given = (states(heads[0]), states(heads[1]), *angles_of(num_tokens, dim, dtype))
    there = [each.to(device) for each in given]
    rotated = rope(*there, implementation=TRITON)
    for result, expected in zip(rotated, rope_reference(*given), strict=True):
        assert result.cpu().equal(expected)
        assert result.transpose(1, 2).is_contiguous()
    assert all(after.cpu().equal(before) for after, before in zip(there, given, strict=True))


@_DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "dim"),
    [(1, 1, 2), (1, 24, 128), (5, 6, 80), (17, 9, 96), (100, 12, 64), (2, 3, 256), (0, 2, 8)],
    ids=str,
)
def test_heads_are_rotated_in_place(
    dtype: torch.dtype, has_norms: bool, num_tokens: int, num_heads: int, dim: int, device: str
) -> None:
    skip_what_is_not_interpreted(device, dtype)
    # Beside them lie others, which stay as they are.
    beside = (torch.randn(num_tokens, num_heads + 3, dim) * 3).to(dtype)
    angles = angles_of(num_tokens, dim, dtype)
    norms = torch.rand(num_heads, dim) if has_norms else None
    expected = qk_norm_rope_reference(beside[:, :num_heads], *angles, norms, 1e-6)
    there = beside.to(device)
    moved = None if norms is None else norms.to(device)
    cosines, sines = (each.to(device) for each in angles)
    heads = there[:, :num_heads]
    qk_norm_rope(heads, cosines, sines, moved, 1e-6, implementation=TRITON)
    assert there[:, num_heads:].cpu().equal(beside[:, num_heads:])
    if num_tokens and has_norms:
        assert_near(heads, expected)
    else:
        assert heads.cpu().equal(expected)


def test_what_does_not_match_is_refused(device: str) -> None:
    heads, angles = torch.randn(3, 2, 8).to(device), torch.randn(1, 3, 8).to(device)
    for wrong in (
        (heads[..., :7], angles, angles),
        (heads[..., ::2], angles[..., ::2], angles[..., ::2]),
        (heads, angles[:, :2], angles),
        (heads, angles, angles[..., :6]),
        (heads, angles, angles, torch.ones(3, 8, device=device)),
    ):
        with pytest.raises(ValueError, match="must be"):
            qk_norm_rope(*wrong, epsilon=1e-6, implementation=TRITON)
    states = heads.transpose(0, 1).unsqueeze(0)
    with pytest.raises(ValueError, match="must be"):
        rope(states, states[:, :, :2], angles, angles, implementation=TRITON)
    with pytest.raises(ValueError, match="must be"):
        rms_norm(heads, torch.ones(7, device=device), 1e-6, implementation=TRITON)
    with pytest.raises(ValueError, match="must be"):
        add_rms_norm(heads, heads[:2], torch.ones(8, device=device), 1e-6, implementation=TRITON)
    with pytest.raises(ValueError, match="must be"):
        gated_activation(heads, heads[:2], Activation.SILU, implementation=TRITON)


@_DTYPES
@pytest.mark.parametrize("num_rows", [2, 19, pytest.param(64, marks=pytest.mark.slow)])
def test_a_row_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, num_rows: int, device: str
) -> None:
    skip_what_is_not_interpreted(device, dtype)
    states, added = torch.randn(2, num_rows, 1536).to(device, dtype)
    weight, norms = torch.randn(1536).to(device), torch.randn(12, 128).to(device)
    cosines, sines = (each.to(device) for each in angles_of(num_rows, 128, dtype))

    def results(rows: slice) -> list[Tensor]:
        heads = states[rows].view(-1, 12, 128).clone()
        angles = cosines[:, rows], sines[:, rows]
        by_head = heads.transpose(0, 1).unsqueeze(0)
        rotated = rope(by_head, by_head[:, :3], *angles, implementation=TRITON)
        qk_norm_rope(heads, *angles, norms, 1e-6, implementation=TRITON)
        return [
            rms_norm(states[rows], weight, 1e-6, implementation=TRITON),
            *add_rms_norm(states[rows], added[rows], weight, 1e-6, implementation=TRITON),
            gated_activation(states[rows], added[rows], Activation.SILU, implementation=TRITON),
            heads,
            *(each.squeeze(0).transpose(0, 1) for each in rotated),
        ]

    together = results(slice(None))
    for row in (0, num_rows // 2, num_rows - 1):
        alone = results(slice(row, row + 1))
        assert all(
            one.equal(all_[row : row + 1]) for one, all_ in zip(alone, together, strict=True)
        )

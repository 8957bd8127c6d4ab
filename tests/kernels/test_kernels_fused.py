"""Chains of elementwise operations: every C++ implementation against the reference."""

import pytest
import torch
from implementations import WITHOUT_PRODUCTS
from torch import Tensor

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

pytestmark = pytest.mark.parametrize("implementation", WITHOUT_PRODUCTS)
_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def assert_near(result: Tensor, expected: Tensor) -> None:
    """Within a rounding of the largest number."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    bound = _TOLERANCE[expected.dtype] * float(expected.float().abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=bound)


@_DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 5, 64), (129, 100), (300, 512)], ids=str)
def test_rms_norm(
    implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    states, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1])
    expected = rms_norm_reference(states, weight, 1e-6)
    assert_near(rms_norm(states, weight, 1e-6, implementation=implementation), expected)


@_DTYPES
def test_rms_norm_of_sums(implementation: Implementation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states, added = (torch.randn(2, 3, 5, 64) * 3).to(dtype)
    weight = torch.randn(64)
    found = add_rms_norm(states, added, weight, 1e-6, implementation=implementation)
    expected = add_rms_norm_reference(states, added, weight, 1e-6)
    assert found[0].equal(expected[0])
    assert_near(found[1], expected[1])


def test_rms_norm_of_strided_rows_and_of_zeros(implementation: Implementation) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(5, 4, 33).transpose(0, 1), torch.ones(33)
    expected = rms_norm_reference(states, weight, 1e-6)
    assert_near(rms_norm(states, weight, 1e-6, implementation=implementation), expected)
    zeros = torch.zeros(2, 33)
    assert rms_norm(zeros, weight, 1e-6, implementation=implementation).equal(zeros)


@_DTYPES
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("shape", [(1, 1), (1, 7, 63), (129, 300)], ids=str)
def test_gated_activation(
    implementation: Implementation,
    dtype: torch.dtype,
    activation: Activation,
    shape: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)
    expected = gated_activation_reference(gate, up, activation)
    assert_near(gated_activation(gate, up, activation, implementation=implementation), expected)


@pytest.mark.parametrize("activation", list(Activation))
def test_gates_far_from_zero(implementation: Implementation, activation: Activation) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -87.5, -0.0, 0.0, 87.5, 200.0, 1e30])
    result = gated_activation(gate, torch.ones(9), activation, implementation=implementation)
    torch.testing.assert_close(result, gate.clamp(min=0), rtol=1e-6, atol=1e-30)


@_DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "heads", "dim"), [(1, (1, 1), 2), (5, (5, 1), 80), (100, (8, 4), 64)], ids=str
)
@pytest.mark.parametrize("tokens_first", [True, False])
def test_rotation(
    implementation: Implementation,
    dtype: torch.dtype,
    num_tokens: int,
    heads: tuple[int, int],
    dim: int,
    tokens_first: bool,
) -> None:
    torch.manual_seed(0)

    def states(num_heads: int) -> Tensor:
        if tokens_first:
            return torch.randn(1, num_tokens, num_heads, dim).to(dtype).transpose(1, 2)
        return torch.randn(1, num_heads, num_tokens, dim).to(dtype)

    query, key = states(heads[0]), states(heads[1])
    angles = torch.randn(1, num_tokens, dim)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    rotated = rope(query, key, cosines, sines, implementation=implementation)
    for result, expected in zip(rotated, rope_reference(query, key, cosines, sines), strict=True):
        assert_near(result, expected)


@_DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "dim"), [(1, 1, 2), (5, 6, 80), (100, 12, 64)], ids=str
)
def test_heads_are_rotated_in_place(
    implementation: Implementation,
    dtype: torch.dtype,
    has_norms: bool,
    num_tokens: int,
    num_heads: int,
    dim: int,
) -> None:
    torch.manual_seed(0)
    # Beside them lie others, which stay as they are.
    beside = (torch.randn(num_tokens, num_heads + 3, dim) * 3).to(dtype)
    heads, others = beside[:, :num_heads], beside[:, num_heads:].clone()
    angles = torch.randn(1, num_tokens, dim)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = torch.rand(num_heads, dim) if has_norms else None
    expected = qk_norm_rope_reference(heads, cosines, sines, norms, 1e-6)
    qk_norm_rope(heads, cosines, sines, norms, 1e-6, implementation=implementation)
    assert_near(heads, expected)
    assert beside[:, num_heads:].equal(others)


def test_heads_that_cannot_be_rotated_are_refused(implementation: Implementation) -> None:
    heads, angles = torch.randn(3, 2, 8), torch.randn(1, 3, 8)
    for wrong in (
        (heads[..., :7], angles, angles),
        (heads[..., ::2], angles[..., ::2].contiguous(), angles[..., ::2].contiguous()),
        (heads, angles[:, :2], angles),
        (heads, angles, angles.double()),
        (heads, angles, angles, torch.ones(3, 8)),
    ):
        with pytest.raises(RuntimeError, match=r"must be|heads are"):
            qk_norm_rope(*wrong, epsilon=1e-6, implementation=implementation)

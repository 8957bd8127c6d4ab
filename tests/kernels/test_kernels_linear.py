"""Products with packed weights: every C++ implementation against the reference."""

from dataclasses import replace

import pytest
import torch
from implementations import OF_PRODUCTS

from kernels.dispatch import Implementation
from kernels.fused import Activation
from kernels.linear import (
    WEIGHT_DTYPES,
    PackedLinear,
    PackedWeight,
    gated_linear,
    gated_linear_reference,
    linear,
    linear_reference,
)

pytestmark = pytest.mark.parametrize("implementation", OF_PRODUCTS)
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("input_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [
        (1, 1, 1),
        (1, 64, 512),
        (5, 16, 7),
        (63, 33, 65),
        (100, 257, 129),
        (130, 2100, 70),
        (700, 48, 300),
    ],
)
def test_products(
    implementation: Implementation,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
) -> None:
    torch.manual_seed(0)
    states = torch.randn(num_rows, num_inputs).to(input_dtype)
    weight = torch.randn(num_outputs, num_inputs).to(weight_dtype)
    packed = PackedWeight.of(weight, implementation)
    residual = torch.randn(num_rows, num_outputs).to(input_dtype)
    for extra in (
        (),
        (torch.randn(num_outputs),),
        (None, residual),
        (residual[0].float(), residual),
    ):
        result, expected = linear(states, packed, *extra), linear_reference(states, weight, *extra)
        assert result.dtype == expected.dtype
        bound = _TOLERANCE[input_dtype] * float(expected.float().abs().max())
        torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("num_outputs", [1, 48, 257, 2100])
def test_gated_products(
    implementation: Implementation, activation: Activation, dtype: torch.dtype, num_outputs: int
) -> None:
    torch.manual_seed(0)
    states = torch.randn(63, 100).to(dtype)
    gate, up = torch.randn(2, num_outputs, 100).to(dtype)
    packed = [PackedWeight.of(weight, implementation) for weight in (gate, up)]
    for biases in ((None, None), (torch.randn(num_outputs), torch.randn(num_outputs))):
        result = gated_linear(states, *packed, activation, *biases)
        expected = gated_linear_reference(states, gate, up, activation, *biases)
        bound = _TOLERANCE[dtype] * float(expected.float().abs().max())
        torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", [96, 4000])
def test_a_row_s_result_is_the_same_in_every_batch(
    implementation: Implementation, num_inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    states = torch.randn(131, num_inputs).to(dtype)
    weight = PackedWeight.of(torch.randn(50, num_inputs).to(dtype), implementation)
    together = linear(states, weight)
    for start, end in [
        (0, 1),
        (7, 9),
        (0, 5),
        (30, 43),
        (64, 131),
        (130, 131),
        (3, 19),
        (3, 20),
        (9, 42),
    ]:
        assert linear(states[start:end].clone(), weight).equal(together[start:end])


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [29, 75])
def test_blocks_of_rows_are_parted(
    implementation: Implementation, dtype: torch.dtype, num_rows: int
) -> None:
    """One panel and much work per row: each tile is a chunk, and the last block has fewer. (Of 29
    rows with AMX, whose tiles have 32, all are one; of 75 some chunks have none.)"""
    torch.manual_seed(0)
    states, residual = torch.randn(num_rows, 22_000).to(dtype), torch.randn(num_rows, 5).to(dtype)
    weight = PackedWeight.of(torch.randn(5, 22_000).to(dtype), implementation)
    together = linear(states, weight, residual=residual)
    for start, end in [(0, 1), (7, 9), (20, 29), (28, 29), (31, 33), (40, 75), (64, 75), (74, 75)]:
        rows = slice(start, end)
        assert linear(states[rows], weight, residual=residual[rows]).equal(together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shapes_and_strides(implementation: Implementation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 40).to(dtype)
    packed = PackedWeight.of(weight, implementation)
    for states in (
        torch.randn(40),
        torch.randn(2, 3, 40),
        torch.randn(2, 0, 40),
        torch.randn(40, 9).T,
        torch.randn(3, 5, 80)[..., ::2],
        torch.randn(7, 64)[:, 3:43],
        torch.randn(7, 63)[:, 3:43],
    ):
        rows = states.to(dtype)
        result, expected = linear(rows, packed), linear_reference(rows, weight)
        torch.testing.assert_close(result, expected, rtol=_TOLERANCE[dtype], atol=1e-5)


def test_zeros_times_infinity_and_nan(implementation: Implementation) -> None:
    """What stands beyond the last output takes part in nothing."""
    weight = torch.tensor([[1.0, 0.0], [torch.inf, 2.0], [torch.nan, 1.0]])
    states = torch.tensor([[0.0, 3.0], [1.0, 1.0]])
    result = linear(states, PackedWeight.of(weight, implementation))
    # What is infinite has a second part, and that is none.
    infinity = torch.nan if implementation == Implementation.CPP_AMX else torch.inf
    expected = torch.tensor([[0.0, torch.nan, torch.nan], [1.0, infinity, torch.nan]])
    assert torch.equal(result.nan_to_num(-7.0, 7.0), expected.nan_to_num(-7.0, 7.0))


@pytest.mark.parametrize("num_inputs", [31, 512])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
def test_no_product_of_float32_loses_bits(
    implementation: Implementation, weight_dtype: torch.dtype, num_inputs: int
) -> None:
    """What is wrong is what rounding the sums of so many does."""
    torch.manual_seed(0)
    states = torch.randn(64, num_inputs)
    weight = torch.randn(96, num_inputs).to(weight_dtype)
    truth = states.double() @ weight.double().T
    result = linear(states, PackedWeight.of(weight, implementation))
    error = (result.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert error < 5e-7


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_large_and_small_numbers(implementation: Implementation, scale: float) -> None:
    torch.manual_seed(0)
    states = torch.randn(5, 40).clamp(-3, 3) / scale
    weight = torch.randn(33, 40).clamp(-3, 3) * scale
    result = linear(states, PackedWeight.of(weight, implementation))
    torch.testing.assert_close(result, linear_reference(states, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
def test_what_is_left_out_of_products_favours_no_sign(
    implementation: Implementation, weight_dtype: torch.dtype
) -> None:
    """Single products, of numbers of one sign: on the average they are right to 2^-28."""
    torch.manual_seed(0)
    states, weight = torch.rand(2000, 1) + 1, (torch.rand(100, 1) + 1).to(weight_dtype)
    truth = states.double() @ weight.double().T
    result = linear(states, PackedWeight.of(weight, implementation)).double()
    assert abs(float(((result - truth) / truth).mean())) < 2**-28
    assert float(((result - truth) / truth).abs().max()) < 2**-22


def test_the_largest_numbers_stay_finite(implementation: Implementation) -> None:
    most = torch.finfo(torch.float32).max
    states = torch.tensor([[most, 0.0], [-most, 0.0], [most / 1.0001, 1.0], [3.3961e38, 2.0]])
    weight = torch.tensor([[0.5, 1.0], [2**-100, 0.0]])
    result = linear(states, PackedWeight.of(weight, implementation))
    torch.testing.assert_close(result, linear_reference(states, weight), rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_outputs", [256, 2100])
@pytest.mark.parametrize("num_rows", [96, 150])
def test_panels_stay_for_some_tiles(
    implementation: Implementation, num_rows: int, num_outputs: int
) -> None:
    """One thread has chunks of one tile and of several, and of one panel and of several."""
    torch.manual_seed(0)
    states = torch.randn(num_rows, 1024).bfloat16()
    gate, up = (
        PackedWeight.of(torch.randn(num_outputs, 1024).bfloat16(), implementation) for _ in "gu"
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        together = linear(states, gate), gated_linear(states, gate, up, Activation.SILU)
        for row in (0, 31, 32, 64, 95, num_rows - 1):
            alone = states[row : row + 1]
            assert linear(alone, gate).equal(together[0][row : row + 1])
            gated = gated_linear(alone, gate, up, Activation.SILU)
            assert gated.equal(together[1][row : row + 1])
    finally:
        torch.set_num_threads(num_threads)


def test_products_of_bfloat16_are_exact(implementation: Implementation) -> None:
    states = torch.tensor([[1.0, 3.0, -2.0] * 30]).bfloat16()
    weight = torch.tensor([[0.5, 1.0, 0.25] * 30, [2.0, -1.0, 4.0] * 30] * 20).bfloat16()
    result = linear(states, PackedWeight.of(weight, implementation))
    assert result.tolist() == [[90.0, -270.0] * 20]


@pytest.mark.parametrize("num_inputs", [7, 8])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_rows_are_looked_up(
    implementation: Implementation, dtype: torch.dtype, num_inputs: int
) -> None:
    weight = torch.randn(100, num_inputs).to(dtype)
    indices = torch.tensor([[0, 99, 15], [16, 17, 99]])
    packed = PackedWeight.of(weight, implementation)
    assert packed.rows(indices).equal(weight[indices])
    assert packed.rows(indices[:0]).shape == (0, 3, num_inputs)
    # Panels go on behind the last row.
    for index in (-1, 100):
        with pytest.raises(IndexError, match=f"there is no row {index}"):
            packed.rows(torch.tensor([3, index]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [(), (0, 1, 2), (1,)], ids=str)
@pytest.mark.parametrize("counts", [(33, 8, 100), (64, 32, 33)], ids=str)
def test_products_are_joined(
    implementation: Implementation,
    counts: tuple[int, ...],
    biased: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    states = torch.randn(5, 40).to(dtype)
    products = [
        PackedLinear(
            PackedWeight.of(torch.randn(count, 40).to(dtype), implementation),
            torch.randn(count) if index in biased else None,
        )
        for index, count in enumerate(counts)
    ]
    joined = PackedLinear.joined(products)
    assert (joined.bias is None) == (not biased)
    parts = joined(states).split(counts, -1)
    for part, product in zip(parts, products, strict=True):
        assert part.equal(product(states))
    rows = [product.weight.rows(torch.arange(product.weight.num_outputs)) for product in products]
    assert joined.weight.rows(torch.arange(sum(counts))).equal(torch.cat(rows))


def test_panels_that_are_not_aligned_are_refused(implementation: Implementation) -> None:
    weight = PackedWeight.of(torch.randn(24, 40), implementation)
    unaligned = torch.empty(weight.panels.numel() + 1)[1:].view_as(weight.panels)
    with pytest.raises(RuntimeError, match="panels must be aligned"):
        linear(torch.randn(1, 40), replace(weight, panels=unaligned))


@pytest.mark.parametrize("num_inputs", [39, 41])
def test_a_wrong_number_of_inputs_is_refused(
    implementation: Implementation, num_inputs: int
) -> None:
    weight = PackedWeight.of(torch.randn(24, 40), implementation)
    with pytest.raises(RuntimeError, match="panels must be"):
        linear(torch.randn(2, num_inputs), weight)
    with pytest.raises(RuntimeError, match="bias must be"):
        linear(torch.randn(2, 40), weight, torch.randn(23))
    for residual in (torch.randn(2, 23), torch.randn(24, 2).T, torch.randn(2, 24).double()):
        with pytest.raises(RuntimeError, match="the residual must be"):
            linear(torch.randn(2, 40), weight, residual=residual)
    other = PackedWeight.of(torch.randn(23, 40), implementation)
    with pytest.raises(ValueError, match="24 outputs for 23"):
        gated_linear(torch.randn(2, 40), weight, other, Activation.SILU)


def test_nothing_is_added_to_gated_products(implementation: Implementation) -> None:
    panels = PackedWeight.of(torch.randn(24, 40), implementation).panels
    states, residual = torch.randn(2, 40), torch.randn(2, 24)
    with pytest.raises(RuntimeError, match="a residual is not supported for gated products"):
        torch.ops.quire.linear(
            states, panels, 24, None, panels, None, Activation.SILU, residual, implementation.isa
        )

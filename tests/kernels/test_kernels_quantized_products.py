"""Products with weights of 8 and 4 bits: every C++ implementation against the reference."""

from dataclasses import replace

import pytest
import torch
from implementations import ROUNDING

from kernels.dispatch import Implementation, cpp_implementations
from kernels.fused import Activation
from kernels.linear import (
    WEIGHT_DTYPES,
    PackedLinear,
    PackedWeight,
    gated_linear,
    gated_linear_reference,
    linear,
    quantized_linear_reference,
    round_rows,
)
from kernels.quantized import Bits, QuantizedWeight, quantize

pytestmark = pytest.mark.parametrize("implementation", cpp_implementations())
_TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def rounds_rows(weight: QuantizedWeight, implementation: Implementation) -> bool:
    return weight.int8_activations and implementation in ROUNDING


def random_weight(
    num_outputs: int, num_inputs: int, bits: Bits, group_size: int | None, *, integers: bool = True
) -> QuantizedWeight:
    """A weight with scales that float16 has exactly."""
    weight = quantize(torch.randn(num_outputs, num_inputs), bits, group_size)
    return replace(
        weight,
        scales=weight.scales.half().float(),
        offsets=weight.offsets.half().float(),
        int8_activations=integers,
    )


def multiplied(
    weight: QuantizedWeight, implementation: Implementation, dtype: torch.dtype
) -> QuantizedWeight:
    """What a product of such rows multiplies with: parts of bfloat16 are rounded to it."""
    narrow = dtype == torch.bfloat16 and implementation.isa >= Implementation.CPP_AVX512_BF16.isa
    has_parts = narrow and weight.bits == 8 and weight.group_size % 2 == 0
    if rounds_rows(weight, implementation) or not has_parts:
        return weight
    numbers = weight.dequantize().bfloat16().float()
    order = weight.permutation
    columns = numbers if order is None else numbers[:, order]
    # A scale per number, as no other weight has it.
    ones = torch.ones_like(weight.values)
    return replace(weight, values=ones, scales=columns, offsets=columns * 0, group_size=1)


@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("bits", "num_rows", "num_outputs", "num_inputs", "group_size"),
    [
        (8, 1, 1, 1, 1),
        (8, 5, 16, 7, None),
        (8, 13, 100, 130, None),
        (8, 3, 33, 64, 32),
        (4, 1, 64, 256, 32),
        (4, 7, 65, 96, 16),
        (4, 12, 31, 50, None),
        (4, 100, 40, 36, 12),
        (4, 25, 16, 33, 3),
        (4, 30, 257, 384, 128),
        (4, 130, 70, 192, 64),
        (8, 600, 40, 256, 128),
        (4, 2048, 33, 64, 64),
    ],
)
def test_products(
    implementation: Implementation,
    dtype: torch.dtype,
    bits: Bits,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    group_size: int | None,
    integers: bool,
) -> None:
    torch.manual_seed(0)
    states = torch.randn(num_rows, num_inputs).to(dtype)
    weight = random_weight(num_outputs, num_inputs, bits, group_size, integers=integers)
    packed = PackedWeight.of_quantized(weight, implementation, dtype)
    expected_weight = multiplied(weight, implementation, dtype)
    residual = torch.randn(num_rows, num_outputs).to(dtype)
    for extra in ((), (torch.randn(num_outputs),), (None, residual)):
        result = linear(states, packed, *extra)
        expected = quantized_linear_reference(
            states, expected_weight, *extra, rounds_rows=rounds_rows(weight, implementation)
        )
        assert result.dtype == expected.dtype
        bound = _TOLERANCE[dtype] * float(expected.float().abs().max())
        torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
def test_products_are_exact_in_float64(
    implementation: Implementation, bits: Bits, integers: bool
) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(9, 1024), random_weight(70, 1024, bits, 32, integers=integers)
    rows = round_rows(states) if rounds_rows(weight, implementation) else states
    truth = rows.double() @ weight.dequantize().double().T
    result = linear(states, PackedWeight.of_quantized(weight, implementation, torch.float32))
    error = (result.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert error < 1e-6


@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 16), (4, 32)])
@pytest.mark.parametrize("activation", list(Activation))
def test_gated_products(
    implementation: Implementation,
    activation: Activation,
    bits: Bits,
    group_size: int | None,
    integers: bool,
) -> None:
    torch.manual_seed(0)
    states = torch.randn(33, 96)
    gate, up = (random_weight(70, 96, bits, group_size, integers=integers) for _ in "gu")
    packed = [PackedWeight.of_quantized(one, implementation, torch.float32) for one in (gate, up)]
    rows = round_rows(states) if rounds_rows(gate, implementation) else states
    for biases in ((None, None), (torch.randn(70), torch.randn(70))):
        result = gated_linear(states, *packed, activation, *biases)
        expected = gated_linear_reference(
            rows, gate.dequantize(), up.dequantize(), activation, *biases
        )
        bound = 2e-6 * float(expected.abs().max())
        torch.testing.assert_close(result, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_are_permuted(
    implementation: Implementation, dtype: torch.dtype, integers: bool
) -> None:
    torch.manual_seed(0)
    order = torch.randperm(64)
    weight = replace(random_weight(40, 64, 4, 16, integers=integers), permutation=order)
    packed = PackedWeight.of_quantized(weight, implementation, dtype)
    states = torch.randn(20, 64).to(dtype)
    expected = quantized_linear_reference(
        states,
        multiplied(weight, implementation, dtype),
        rounds_rows=rounds_rows(weight, implementation),
    )
    bound = _TOLERANCE[dtype] * float(expected.float().abs().max())
    torch.testing.assert_close(linear(states, packed).float(), expected.float(), rtol=0, atol=bound)
    indices = torch.tensor([39, 0, 33])
    assert packed.rows(indices).equal(weight.rows(indices).to(dtype))
    other = replace(weight, permutation=order.flip(0))
    assert not packed.is_like(PackedWeight.of_quantized(other, implementation, dtype))
    assert packed.is_like(PackedWeight.of_quantized(weight, implementation, dtype))


@pytest.mark.parametrize(("bits", "largest"), [(8, 1 << 16), (4, 1 << 17)])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_sums_of_the_largest_group_do_not_overflow(
    implementation: Implementation, bits: Bits, largest: int, num_rows: int
) -> None:
    def weight(num_inputs: int) -> PackedWeight:
        values = torch.full((1, num_inputs), 2**bits - 1, dtype=torch.uint8)
        ones = torch.ones(1, 1)
        quantized = QuantizedWeight(values, bits, ones, 0 * ones, num_inputs, int8_activations=True)
        return PackedWeight.of_quantized(quantized, implementation, torch.float32)

    result = linear(torch.full((num_rows, largest), -1.0), weight(largest))
    expected = torch.full((num_rows, 1), -float(largest * (2**bits - 1)))
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match=f"a group has at most {largest} inputs"):
        weight(2 * largest)


@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 32), (4, 128)])
def test_a_row_s_result_is_the_same_in_every_batch(
    implementation: Implementation, bits: Bits, group_size: int | None, integers: bool
) -> None:
    torch.manual_seed(0)
    states = torch.randn(131, 1024).bfloat16()
    weight = PackedWeight.of_quantized(
        random_weight(70, 1024, bits, group_size, integers=integers), implementation, torch.bfloat16
    )
    together = linear(states, weight)
    for start, end in [(0, 1), (7, 9), (0, 5), (30, 43), (64, 131), (130, 131), (3, 19)]:
        assert linear(states[start:end].clone(), weight).equal(together[start:end])


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 6), (4, 32), (4, 10), (4, None)])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_weights_are_unpacked(
    implementation: Implementation, bits: Bits, group_size: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_inputs = 3 * (group_size or 21)
    weight = random_weight(100, num_inputs, bits, group_size, integers=False)
    packed = PackedWeight.of_quantized(weight, implementation, dtype)
    found = packed.unpacked()
    for name in ("values", "scales", "offsets"):
        assert getattr(found, name).equal(getattr(weight, name)), name
    assert (found.bits, found.group_size, found.permutation) == (bits, weight.group_size, None)
    assert not found.int8_activations
    indices = torch.tensor([[0, 99], [31, 32]])
    rows = weight.dequantize()[indices]
    torch.testing.assert_close(packed.rows(indices), rows.to(dtype), rtol=0, atol=1e-6)
    with pytest.raises(IndexError, match="there is no row 100"):
        packed.rows(torch.tensor([100]))


def test_scales_that_float16_lacks_stay_as_they_are(implementation: Implementation) -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(5, 64), 4, 32)
    for factor, is_rounded in ((1.0, True), (1e-5, False), (1e6, False)):
        scaled = replace(weight, scales=weight.scales * factor, offsets=weight.offsets * factor)
        packed = PackedWeight.of_quantized(scaled, implementation, torch.float32)
        found = packed.unpacked().scales
        assert found.equal(scaled.scales.half().float() if is_rounded else scaled.scales)


@pytest.mark.parametrize("counts", [(33, 8), (64, 32, 9)], ids=str)
def test_products_are_joined(implementation: Implementation, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    states = torch.randn(5, 64)
    weights = [random_weight(count, 64, 4, 32) for count in counts]
    products = [
        PackedLinear(PackedWeight.of_quantized(one, implementation, torch.float32), None)
        for one in weights
    ]
    joined = PackedLinear.joined(products)
    parts = joined(states).split(counts, -1)
    for part, product in zip(parts, products, strict=True):
        assert part.equal(product(states))
    wide = PackedLinear(PackedWeight.of(torch.randn(8, 64), implementation), None)
    with pytest.raises(ValueError, match="some are quantised"):
        PackedLinear.joined([*products, wide])


def test_what_is_not_a_number_stays_so(implementation: Implementation) -> None:
    weight = PackedWeight.of_quantized(random_weight(3, 64, 8, None), implementation, torch.float32)
    states = torch.zeros(3, 64)
    states[1, 5], states[2, 63] = torch.nan, torch.inf
    result = linear(states, weight)
    assert (result[0] == 0).all()
    assert not result[1:].isfinite().any()


def test_bytes_that_are_no_weight_are_refused(implementation: Implementation) -> None:
    weight = random_weight(40, 64, 4, 32)
    packed = PackedWeight.of_quantized(weight, implementation, torch.float32)
    states = torch.randn(2, 64)
    for panels in (packed.panels[:-1], packed.panels[1:], packed.panels[:10]):
        with pytest.raises(RuntimeError, match="quantised weight"):
            linear(states, replace(packed, panels=panels.clone()))
    with pytest.raises(RuntimeError, match="panels must be"):
        linear(states[:, :32].contiguous(), packed)
    other = PackedWeight.of_quantized(random_weight(40, 64, 8, 32), implementation, torch.float32)
    with pytest.raises(RuntimeError, match="weights must be alike"):
        gated_linear(states, packed, other, Activation.SILU)
    permutation = torch.arange(64)
    permutation[3] = 64
    with pytest.raises(IndexError, match="there is no input 64"):
        PackedWeight.of_quantized(
            replace(weight, permutation=permutation), implementation, torch.float32
        )

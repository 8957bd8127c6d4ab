"""Products with quantised weights in Triton against the reference."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from triton_devices import DEVICES, skip_what_is_not_interpreted

from kernels.dispatch import Implementation
from kernels.gpu import tiled_linear as triton_linear
from kernels.gpu.launch import INTERPRETED
from kernels.gpu.linear_launch import num_splits
from kernels.inputs.tiled_weight import TiledWeight
from kernels.quantized import Bits, QuantizedWeight, quantize
from kernels.tiled_linear import (
    TiledLinear,
    round_rows_to_int8,
    round_rows_to_int8_reference,
    tiled_linear,
    tiled_linear_reference,
)

TRITON = Implementation.TRITON
pytestmark = pytest.mark.parametrize("device", DEVICES)
_TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
_DTYPES = pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)


def random_weight(
    num_outputs: int, num_inputs: int, bits: Bits, group_size: int | None, *, integers: bool = False
) -> QuantizedWeight:
    """Rounded from random numbers; with offsets where they have groups."""
    weight = quantize(torch.randn(num_outputs, num_inputs), bits, group_size)
    offsets = weight.offsets
    if bits == 8 and not integers and weight.group_size < num_inputs:
        offsets = offsets + torch.randn_like(offsets) * weight.scales
    return replace(weight, offsets=offsets, int8_activations=integers)


def assert_equals_the_reference(
    states: Tensor, weight: TiledWeight, bias: Tensor | None, device: str
) -> None:
    expected = tiled_linear_reference(states, weight, bias).float()
    there = weight.to(torch.device(device))
    bias = None if bias is None else bias.to(device)
    actual = tiled_linear(states.to(device), there, bias, implementation=TRITON)
    assert actual.dtype == states.dtype
    bound = _TOLERANCE[states.dtype] * float(expected.abs().max())
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=0, atol=bound)


@_DTYPES
@pytest.mark.parametrize(
    ("bits", "num_rows", "num_outputs", "num_inputs", "group_size"),
    [
        (8, 1, 1, 1, None),
        (8, 5, 16, 7, 1),
        (8, 13, 100, 130, None),
        (8, 3, 33, 64, 32),
        (8, 17, 70, 96, 16),
        (8, 150, 40, 256, 128),
        (4, 1, 64, 256, 32),
        (4, 7, 65, 96, 16),
        (4, 12, 31, 50, None),
        (4, 70, 40, 36, 12),
        (4, 25, 16, 33, 3),
        (4, 30, 257, 384, 128),
        (4, 130, 70, 192, 64),
        (4, 2, 30, 300, 100),
    ],
)
def test_products(
    bits: Bits,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    group_size: int | None,
    dtype: torch.dtype,
    device: str,
) -> None:
    skip_what_is_not_interpreted(device, dtype)
    torch.manual_seed(0)
    states = torch.randn(num_rows, num_inputs).to(dtype)
    weight = random_weight(num_outputs, num_inputs, bits, group_size)
    tiled = TiledWeight.of(weight, dtype)
    assert not tiled.rounds_rows
    assert_equals_the_reference(states, tiled, None, device)
    assert_equals_the_reference(states[:2], tiled, torch.randn(num_outputs), device)


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 6), (4, 32), (4, 10), (4, None)])
def test_weights_are_unpacked(bits: Bits, group_size: int | None, device: str) -> None:
    torch.manual_seed(0)
    weight = random_weight(100, 3 * (group_size or 21), bits, group_size)
    halves = replace(weight, scales=weight.scales.half().float())
    for exact in (
        # Groups too small for float16, offsets that are multiples of such scales, one group.
        replace(weight, scales=weight.scales * 1e-6, offsets=weight.offsets * 1e-6),
        replace(halves, offsets=halves.scales * torch.randint(1, 15, halves.scales.shape)),
        replace(halves, offsets=halves.offsets.half().float()),
    ):
        tiled = TiledWeight.of(exact.to(torch.device(device)), torch.float32)
        found = tiled.unpacked().to(torch.device("cpu"))
        for name in ("values", "scales", "offsets"):
            assert getattr(found, name).equal(getattr(exact, name)), name
        indices = torch.tensor([[0, 99], [31, 32]])
        rows = tiled.rows(indices.to(device)).cpu()
        torch.testing.assert_close(rows, exact.dequantize()[indices], rtol=1e-6, atol=1e-12)


def test_scales_of_groups_are_rounded(device: str) -> None:
    weight = quantize(torch.randn(5, 64), 4, 32).to(torch.device(device))
    found = TiledWeight.of(weight, torch.float32).unpacked()
    for name in ("scales", "offsets"):
        assert getattr(found, name).equal(getattr(weight, name).half().float()), name


@_DTYPES
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(1, 1, 1), (7, 65, 130), (17, 30, 256), (70, 20, 99)],
)
def test_products_of_integers(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: str
) -> None:
    skip_what_is_not_interpreted(device, dtype)
    torch.manual_seed(0)
    states = torch.randn(num_rows, num_inputs).to(dtype)
    tiled = TiledWeight.of(random_weight(num_outputs, num_inputs, 8, None, integers=True), dtype)
    assert tiled.rounds_rows
    assert_equals_the_reference(states, tiled, None, device)
    assert_equals_the_reference(states, tiled, torch.randn(num_outputs), device)


@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, None), (4, 64), (4, 32)])
def test_products_near_those_in_float64(
    bits: Bits, group_size: int | None, integers: bool, device: str
) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(9, 1024), random_weight(70, 1024, bits, group_size)
    tiled = TiledWeight.of(replace(weight, int8_activations=integers), torch.float32)
    rows = states
    if tiled.rounds_rows:
        numbers, scales = round_rows_to_int8_reference(states)
        rows = numbers.float() * scales.unsqueeze(1)
    truth = rows.double() @ tiled.unpacked().dequantize().double().T
    there = tiled.to(torch.device(device))
    result = tiled_linear(states.to(device), there, implementation=TRITON).cpu()
    error = (result.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert error < 1e-6


@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
def test_columns_are_permuted(integers: bool, device: str) -> None:
    torch.manual_seed(0)
    weight = random_weight(40, 64, 8, None, integers=integers)
    weight = replace(weight, permutation=torch.randperm(64))
    states = torch.randn(2, 10, 64)
    tiled = TiledWeight.of(weight, torch.float32)
    assert_equals_the_reference(states, tiled, torch.randn(40), device)
    if not integers:
        expected = states @ weight.dequantize().T
        torch.testing.assert_close(tiled_linear_reference(states, tiled), expected)


@pytest.mark.parametrize(
    ("bits", "group_size", "integers"), [(8, None, False), (8, None, True), (4, 32, False)]
)
@pytest.mark.parametrize("num_rows", [3, 12, 20])
def test_sums_of_splits(
    bits: Bits,
    group_size: int | None,
    integers: bool,
    num_rows: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows in programs of their own, many in one program; splits that are not equal, and one
    that is empty."""
    monkeypatch.setattr(triton_linear, "num_splits", lambda *sizes: 4)
    torch.manual_seed(0)
    weight = random_weight(70, 288, bits, group_size, integers=integers)
    tiled = TiledWeight.of(weight, torch.float16)
    states = torch.randn(num_rows, 288).half()
    assert_equals_the_reference(states, tiled, torch.randn(70), device)


@pytest.mark.parametrize(
    ("bits", "group_size", "integers"),
    [
        (4, None, False),
        *(
            pytest.param(*factors, marks=pytest.mark.slow)
            for factors in ((8, None, True), (8, None, False), (8, 32, False), (4, 32, False))
        ),
    ],
)
def test_a_row_s_result_is_the_same_in_every_batch(
    bits: Bits, group_size: int | None, integers: bool, device: str
) -> None:
    """Of numbers whose sums are exact in the interpreter, whose libraries add in any order."""
    torch.manual_seed(0)
    weight = random_weight(70, 2048, bits, group_size, integers=integers)
    if device == "cpu":
        weight = replace(weight, scales=torch.full_like(weight.scales, 0.5))
        weight = replace(weight, offsets=weight.scales * 2 ** (bits - 1))
    states = torch.randint(-8, 8, (131, 2048)).to(torch.float16)
    tiled = TiledWeight.of(weight, torch.float16).to(torch.device(device))
    assert num_splits(INTERPRETED, 70, 2048) == 2
    states = states.to(device)
    together = tiled_linear(states, tiled, implementation=TRITON)
    for start, end in pairwise((0, 1, 6, 20, 60, 131)):
        alone = tiled_linear(states[start:end], tiled, implementation=TRITON)
        assert alone.equal(together[start:end])


def test_rows_that_are_not_dense(device: str) -> None:
    torch.manual_seed(0)
    tiled = TiledWeight.of(random_weight(20, 64, 4, 32), torch.float32)
    wide = torch.randn(5, 100)
    for states in (wide[:, 3:67], torch.randn(64, 5).T, wide[:0, :64]):
        expected = tiled_linear_reference(states, tiled)
        there = tiled.to(torch.device(device))
        actual = tiled_linear(states.to(device), there, implementation=TRITON).cpu()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("integers", [True, False], ids=["int8-rows", "wide-rows"])
def test_what_is_not_a_number_stays_in_its_row(bits: Bits, integers: bool, device: str) -> None:
    weight = random_weight(3, 64, bits, None, integers=integers)
    tiled = TiledWeight.of(weight, torch.float32).to(torch.device(device))
    states = torch.zeros(4, 64)
    states[1, 5], states[2, 63] = torch.nan, torch.inf
    result = tiled_linear(states.to(device), tiled, implementation=TRITON)
    assert (result[[0, 3]] == 0).all()
    assert not result[1:3].isfinite().any()


@_DTYPES
@pytest.mark.parametrize("size", [(1, 1), (5, 1024), (3, 2100), (2, 33), (0, 5)], ids=str)
def test_rows_are_rounded_as_the_reference_does(
    size: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    """Bit for bit: ties, rows of zeros and tiny numbers among them."""
    skip_what_is_not_interpreted(device, dtype)
    torch.manual_seed(0)
    rows = (torch.randn(size) * 10).to(dtype)
    if rows.numel() > 1:
        rows[0, :2] = torch.tensor([127.0, 126.5]).to(dtype)[: rows.shape[1]]
    if len(rows) > 1:
        rows[1] = 0.0
    expected = round_rows_to_int8_reference(rows)
    found = round_rows_to_int8(rows.to(device), implementation=TRITON)
    assert found[0].cpu().equal(expected[0])
    assert found[1].cpu().equal(expected[1])


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 32)])
def test_joined_weights(bits: Bits, group_size: int | None, device: str) -> None:
    weights = [random_weight(size, 64, bits, group_size, integers=True) for size in (48, 16, 33)]
    tiled = [TiledWeight.of(weight, torch.float32).to(torch.device(device)) for weight in weights]
    layers = [TiledLinear(one, torch.randn(one.num_outputs).to(device), TRITON) for one in tiled]
    joined = TiledLinear.joined(layers)
    assert joined is not None
    states = torch.randn(5, 64).to(device)
    expected = torch.cat([layer(states) for layer in layers], -1)
    torch.testing.assert_close(joined(states), expected, rtol=1e-5, atol=1e-4)
    assert TiledLinear.joined([layers[0], replace(layers[1], bias=None)]) is None


def test_weights_of_different_formats_are_not_joined(device: str) -> None:
    order = torch.arange(64).flip(0)

    def tiled(bits: Bits, group_size: int | None, permutation: Tensor | None) -> TiledWeight:
        weight = replace(random_weight(16, 64, bits, group_size), permutation=permutation)
        return TiledWeight.of(weight, torch.float32).to(torch.device(device))

    one = tiled(4, 32, order)
    assert TiledWeight.joined([one, tiled(4, 32, order.clone())]) is not None
    for other in (tiled(4, 16, order), tiled(8, 32, order), tiled(4, 32, None),
                  tiled(4, 32, order.roll(1))):  # fmt: skip
        assert TiledWeight.joined([one, other]) is None

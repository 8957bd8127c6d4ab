"""Weights of 8 and 4 bits: what they stand for, and how weights are rounded to them."""

from typing import Any

import pytest
import torch

from kernels.quantized import Bits, QuantizedWeight, quantize


def small(**changes: Any) -> QuantizedWeight:
    """Two outputs, four inputs, groups of two."""
    parts: dict[str, Any] = {
        "values": torch.tensor([[0, 1, 2, 15], [3, 4, 5, 6]], dtype=torch.uint8),
        "bits": 4,
        "scales": torch.tensor([[1.0, 2.0], [0.5, 4.0]]),
        "offsets": torch.tensor([[0.0, 10.0], [1.0, 0.0]]),
        "group_size": 2,
        **changes,
    }
    return QuantizedWeight(**parts)


def test_a_weight_is_scale_times_value_minus_offset() -> None:
    expected = torch.tensor([[0.0, 1.0, -6.0, 20.0], [0.5, 1.0, 20.0, 24.0]])
    assert small().dequantize().equal(expected)


def test_a_permutation_names_the_input_of_each_column() -> None:
    weight = small(permutation=torch.tensor([2, 0, 3, 1]))
    expected = torch.tensor([[1.0, 20.0, 0.0, -6.0], [1.0, 24.0, 0.5, 20.0]])
    assert weight.dequantize().equal(expected)


def test_rows_of_some_outputs() -> None:
    weight = small(permutation=torch.tensor([2, 0, 3, 1]))
    indices = torch.tensor([1, 1, 0])
    assert weight.rows(indices).equal(weight.dequantize()[indices])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "3 bits"),
        ({"group_size": 3}, "groups of 3 do not divide 4 inputs"),
        ({"group_size": 0}, "groups of 0"),
        ({"group_size": 4}, r"scales: torch.float32 \[2, 2\], not torch.float32 \[2, 1\]"),
        ({"offsets": torch.zeros(2, 1)}, r"offsets.*\[2, 1\]"),
        ({"scales": torch.ones(2, 2, dtype=torch.float16)}, "scales: torch.float16"),
        ({"values": torch.zeros(2, 4, dtype=torch.int8)}, "values: torch.int8"),
        ({"permutation": torch.tensor([0, 1])}, "permutation"),
    ],
)
def test_parts_that_do_not_fit_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_smaller_groups_of_the_same_weight() -> None:
    regrouped = small().regrouped(1)
    assert regrouped.scales.equal(torch.tensor([[1.0, 1, 2, 2], [0.5, 0.5, 4, 4]]))
    assert regrouped.dequantize().equal(small().dequantize())
    with pytest.raises(ValueError, match="groups of 2 in groups of 4"):
        small().regrouped(4)


def test_joined_weights_keep_their_numbers() -> None:
    torch.manual_seed(0)
    one = quantize(torch.randn(3, 48), 4)
    other = quantize(torch.randn(5, 48), 8)
    joined = QuantizedWeight.joined([one, other])
    assert (joined.bits, joined.group_size, joined.int8_activations) == (8, 16, True)
    assert joined.dequantize().equal(torch.cat([one.dequantize(), other.dequantize()]))
    ordered = QuantizedWeight.joined([small(permutation=torch.tensor([1, 0, 3, 2]))] * 2)
    assert ordered.permutation is not None
    for wrong in (small(), small(permutation=torch.tensor([0, 1, 2, 3]))):
        with pytest.raises(ValueError, match="different orders"):
            QuantizedWeight.joined([ordered, wrong])


def test_eight_bits_are_symmetric_per_output() -> None:
    weight = torch.tensor([[127.0, -127.0, 1.4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    quantized = quantize(weight, 8)
    assert quantized.values.tolist() == [[255, 1, 129, 128], [128] * 4]
    assert quantized.scales.tolist() == [[1.0], [1.0]]
    assert quantized.offsets.tolist() == [[128.0], [128.0]]
    assert quantized.int8_activations


def test_four_bits_have_groups_with_offsets() -> None:
    ramp = torch.arange(16.0).repeat(2)
    weight = torch.stack([torch.cat([ramp, 2 * ramp - 30]), torch.full((64,), 0.3)])
    quantized = quantize(weight, 4, 32)
    assert quantized.scales[0].tolist() == [1.0, 2.0]
    assert quantized.offsets[0].tolist() == [0.0, 30.0]
    torch.testing.assert_close(quantized.dequantize(), weight)


@pytest.mark.parametrize(
    ("num_inputs", "group_size"), [(256, 128), (192, 64), (96, 32), (48, 16), (50, 50)]
)
def test_groups_divide_the_inputs(num_inputs: int, group_size: int) -> None:
    assert quantize(torch.randn(2, num_inputs), 4).group_size == group_size


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 16), (4, None), (4, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_are_those_of_rounding(
    bits: Bits, group_size: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 256).to(dtype)
    quantized = quantize(weight, bits, group_size)
    groups = weight.float().view(7, -1, quantized.group_size)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    if bits == 8:
        step = groups.abs().amax(-1) / 127
    mean_square = (quantized.dequantize() - weight.float()).view_as(groups).square().mean(-1)
    # The variance of an error that is anything up to half a step.
    assert (mean_square.mean() / step.square().mean()).item() < 1.05 / 12


def test_large_weights_are_quantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(9, 64)
    whole = quantize(weight, 4)
    monkeypatch.setattr("kernels.quantized._WEIGHTS_AT_ONCE", 128)
    parts = quantize(weight, 4)
    assert parts.values.equal(whole.values)
    assert parts.dequantize().equal(whole.dequantize())

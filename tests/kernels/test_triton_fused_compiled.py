"""The code of the operations between products that is compiled for an H200, without one."""

import pytest
from compiled_launches import Launch, compiled_by, instructions, of

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_KERNELS = {"rms_norm_kernel": 2, "gated_activation_kernel": 3, "qk_norm_rope_kernel": 2,
            "rope_kernel": 1}  # fmt: skip


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """Compiled in a process that does not interpret."""
    found: list[Launch] = compiled_by("compiled_fused")
    return found


def test_nothing_is_spilled(launches: list[Launch]) -> None:
    assert {launch["kernel"] for launch in launches} == set(_KERNELS)
    for launch in launches:
        described = {name: value for name, value in launch.items() if name != "ptx"}
        assert launch["spilled_bytes"] == 0, described
        assert launch["registers"] <= 128, described


def test_numbers_are_moved_by_16_bytes(launches: list[Launch]) -> None:
    """But the weights of short rows, of which a thread reads one for several rows."""
    for launch in launches:
        described = {name: value for name, value in launch.items() if name != "ptx"}
        for direction in ("ld", "st"):
            assert instructions(launch, rf"{direction}\.global\.v4\.b32") > 0, described
            narrow = instructions(launch, rf"{direction}\.global\.(?!v4)")
            is_weight = direction == "ld" and launch["kernel"] == "rms_norm_kernel"
            assert narrow <= is_weight, described


def test_products_are_rounded_before_they_are_added(launches: list[Launch]) -> None:
    """As the references do."""
    assert all(instructions(launch, r"fma\.rn\.f32") == 0 for launch in launches)


def test_steps_of_any_size_run_the_same_code(launches: list[Launch]) -> None:
    """A new size must not cause a compilation while requests wait."""
    for kernel, kinds in _KERNELS.items():
        found = of(launches, kernel, rows="many")
        assert len(found) == 5 * kinds
        # Both kinds of gates in a product are the same code as gates of two products.
        assert len({launch["ptx"] for launch in found}) <= kinds

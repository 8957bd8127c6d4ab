"""The code of products with quantised weights that is compiled for an H200, without one."""

import pytest
from compiled_launches import Launch, compiled_by, instructions, of

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """Compiled in a process that does not interpret."""
    found: list[Launch] = compiled_by("compiled_linear")
    return found


def test_all_fit_and_nothing_is_spilled(launches: list[Launch]) -> None:
    for launch in launches:
        described = {name: value for name, value in launch.items() if name != "ptx"}
        assert launch["spilled_bytes"] == 0, described
        assert launch["shared_bytes"] <= _SHARED_BYTES, described


def test_products_run_on_groups_of_warps(launches: list[Launch]) -> None:
    for launch in of(launches, "tiled_linear_kernel", dtype="torch.bfloat16"):
        assert instructions(launch, r"wgmma\.mma_async\.sync\.aligned\S*\.f32\.bf16\.bf16") > 0
        assert instructions(launch, r"mma\.sync") == 0
    for launch in of(launches, "int8_linear_kernel"):
        is_few = launch.get("num_rows") == "1" or launch["shared_bytes"] < 32 * 1024
        of_groups = instructions(launch, r"wgmma\.mma_async\.sync\.aligned\S*\.s32\.s8\.s8")
        of_warps = instructions(launch, r"mma\.sync\.aligned\S*\.s32\.s8\.s8")
        assert (of_groups == 0, of_warps > 0) == (is_few, is_few)


def test_values_are_converted_in_registers(launches: list[Launch]) -> None:
    """By permutations of bytes, four at a time, on their way to tensor cores."""
    for launch in of(launches, "tiled_linear_kernel", dtype="torch.bfloat16", num_rows="1"):
        assert instructions(launch, r"cvt\.rn\.bf16\.s|cvt\.rn\.f32\.s") == 0
        assert instructions(launch, r"prmt") > 0


def test_halves_of_bytes_are_converted_four_at_a_time(launches: list[Launch]) -> None:
    for dtype, fma in (("torch.bfloat16", "bf16x2"), ("torch.float16", "f16x2")):
        for launch in of(launches, "tiled_linear_kernel", bits="4", dtype=dtype):
            assert instructions(launch, rf"fma\.rn\.{fma}") > 0
            assert instructions(launch, r"shl\.b16|and\.b16") == 0


def test_weights_and_rows_are_fetched_ahead(launches: list[Launch]) -> None:
    """Weights that are converted to 16 bits on their way to tensor cores by 8 bytes, the rest by
    16. A tile of a group of 16 has fewer bytes per thread."""
    for launch in of(launches, "int8_linear_kernel"):
        assert instructions(launch, r"cp\.async\.cg[^;]*, 0x10,") > 0
    for launch in of(launches, "tiled_linear_kernel"):
        assert instructions(launch, r"cp\.async\.c[ag][^;]*, 0x(8|10),") > 0
        if launch.get("group_size") != "16" and launch.get("dtype") != "torch.float32":
            assert instructions(launch, r"cp\.async\.ca[^;]*, 0x[124],") == 0
            assert launch.get("num_rows") == "1" or instructions(launch, r"cp\.async\.cg") > 0


def test_decoding_leaves_room_for_a_second_program(launches: list[Launch]) -> None:
    for kernel in ("tiled_linear_kernel", "int8_linear_kernel"):
        for launch in of(launches, kernel, num_rows="1"):
            assert launch["shared_bytes"] <= _SHARED_BYTES // 2
            assert launch["registers"] * 128 <= 65536 // 2


def test_steps_of_any_size_run_the_same_code(launches: list[Launch]) -> None:
    """A new size must not cause a compilation while requests wait."""
    for kernel, kinds in (
        # Groups whose sums are divided have tiles of two sizes.
        ("tiled_linear_kernel", 2),
        ("int8_linear_kernel", 4),
        ("_round_rows_kernel", 1),
        # Sums of numbers, and of integers.
        ("add_splits_kernel", 2),
    ):
        found = of(launches, kernel, steps="many")
        assert len(found) >= 2 * kinds
        assert len({launch["ptx"] for launch in found}) == kinds

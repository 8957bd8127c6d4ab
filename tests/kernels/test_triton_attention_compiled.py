"""The code of attention and of cache writes that is compiled for an H200, without one."""

import pytest
from compiled_launches import Launch, compiled_by, instructions, of

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """Compiled in a process that does not interpret."""
    found: list[Launch] = compiled_by("compiled_attention")
    return found


def test_all_fit_into_shared_memory(launches: list[Launch]) -> None:
    assert max(launch["shared_bytes"] for launch in launches) <= _SHARED_BYTES


def test_nothing_is_spilled(launches: list[Launch]) -> None:
    for launch in launches:
        # Single precision and the widest heads are at the limit, which compilers draw differently.
        strict = launch.get("head_dim") != "256" and launch.get("cache_dtype") != "torch.float32"
        allowed = 0 if strict else 512
        if launch.get("window") == "128":
            # Four words, stored before the loop and loaded behind it.
            allowed = 32
        described = {name: value for name, value in launch.items() if name != "ptx"}
        assert launch["spilled_bytes"] <= allowed, described


def test_half_precision_prefill_runs_on_groups_of_warps(launches: list[Launch]) -> None:
    for launch in of(launches, "paged_attention_kernel", query_len="512"):
        if launch["cache_dtype"] != "torch.float32":
            assert instructions(launch, r"wgmma\.mma_async") > 0
            assert instructions(launch, r"mma\.sync") == 0


def test_everything_multiplies_on_tensor_cores(launches: list[Launch]) -> None:
    for launch in of(launches, "paged_attention_kernel"):
        assert instructions(launch, r"mma\.sync|wgmma\.mma_async") > 0


@pytest.mark.parametrize("query_len", ["1", "512"])
def test_keys_and_values_are_fetched_ahead_by_16_bytes(
    launches: list[Launch], query_len: str
) -> None:
    for launch in of(launches, "paged_attention_kernel", query_len=query_len):
        eight_bits = launch["cache_dtype"] == "torch.float8_e4m3fn"
        # Where heads have 72 or 120 bytes, they begin at multiples of 8.
        if not (eight_bits and launch["head_dim"] in ("72", "120")):
            assert instructions(launch, r"cp\.async\.cg\.shared\.global[^;]*, 0x10,") > 0
        # Numbers of 8 bits are converted on their way to the tensor cores, by 8 at a time.
        narrow = instructions(launch, r"cp\.async\.ca[^;]*, 0x[124],")
        assert narrow == 0
        assert instructions(launch, r"cp\.async\.c[ag]\.") > 0
        if not eight_bits:
            assert instructions(launch, r"cp\.async\.ca") == 0
        # Single numbers are read of sinks alone.
        assert instructions(launch, r"ld\.global\.b(8|16)") <= 2 * ("sinks" in launch)


def test_decoding_leaves_room_for_a_second_program(launches: list[Launch]) -> None:
    for launch in of(launches, "paged_attention_kernel", query_len="1", head_dim="128"):
        assert launch["shared_bytes"] <= _SHARED_BYTES // 2
        assert launch["registers"] * 128 <= 65536 // 2


def test_every_format_is_written_into_every_cache(launches: list[Launch]) -> None:
    found = of(launches, "_kv_write_kernel", head_dim="128")
    formats = {(launch["dtype"], launch["cache_dtype"], launch["scale"]) for launch in found}
    assert len(formats) == 3 * 5 * 2


def test_cache_entries_are_written_by_16_bytes(launches: list[Launch]) -> None:
    for launch in of(launches, "_kv_write_kernel"):
        assert instructions(launch, r"st\.global\.v4\.b32") > 0
        assert instructions(launch, r"st\.global\.(?!v4\.b32)") == 0


def test_steps_of_any_size_run_the_same_code(launches: list[Launch]) -> None:
    """A new size must not cause a compilation while requests wait."""
    for kernel, kinds in (
        # For short queries, whole and in partitions, and for long ones.
        ("paged_attention_kernel", 3),
        ("merge_partitions_kernel", 1),
        ("_kv_write_kernel", 1),
    ):
        found = of(launches, kernel, steps="many")
        assert len(found) > 2 * kinds
        assert len({launch["ptx"] for launch in found}) == kinds

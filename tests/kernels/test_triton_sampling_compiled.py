"""The code of the sampler, of changes of logits and of block copies that is compiled for an H200,
without one."""

import pytest
from compiled_launches import Launch, compiled_by, instructions

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

Launches = dict[str, list[Launch]]


@pytest.fixture(scope="module")
def launches() -> Launches:
    """By the kind of data; compiled in a process that does not interpret."""
    found: Launches = compiled_by("compiled_sampling")
    return found


def test_nothing_is_spilled(launches: Launches) -> None:
    assert sum(len(found) for found in launches.values()) == 24
    for found in launches.values():
        for launch in found:
            assert launch["spilled_bytes"] == 0, launch["kernel"]
            assert launch["registers"] <= 168, launch["kernel"]


def test_whole_blocks_are_copied_by_16_bytes(launches: Launches) -> None:
    (copy,) = launches["aligned blocks"]
    for direction in ("ld", "st"):
        wide = instructions(copy, rf"{direction}\.global\.v4\.b32")
        # Beside the table and the ids, which are read.
        narrow = instructions(copy, rf"{direction}\.global\.(?!v4)") - 5 * (direction == "ld")
        assert (wide, narrow) == (4, 0)


def test_blocks_that_begin_anywhere_are_copied_all_the_same(launches: Launches) -> None:
    (copy,) = launches["odd blocks"]
    assert instructions(copy, r"st\.global\.b8") > 0


def test_rows_are_read_by_vectors(launches: Launches) -> None:
    reading = {"peaks_kernel", "argmax_kernel", "collect_kernel", "filter_kernel", "_tiles_kernel"}
    for kind in ("float32", "bfloat16"):
        found = [launch for launch in launches[kind] if launch["kernel"] in reading]
        assert {launch["kernel"] for launch in found} == reading
        for launch in found:
            assert instructions(launch, r"ld\.global\.v[24]\.b32") > 0, launch["kernel"]

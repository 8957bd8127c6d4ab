"""The addresses that products prefetch while they multiply."""

import pytest
from kernel_internals import prefetched, prefetched_ahead

from kernels.dispatch import cpp_implementations

pytestmark = pytest.mark.skipif(not cpp_implementations(), reason="there is no compiler")

LINE, SHORT_DISTANCE = 64, 8192
OWN, OWN_SECOND, NEXT, NEXT_SECOND, ROWS = (n << 40 for n in range(1, 6))


def prefetched_lines(
    num_inputs: int,
    num_tiles: int,
    own: int = 1,
    next_panels: int = 1,
    next_bytes: int = 0,
    row_bytes: int = 0,
) -> dict[int, set[int]]:
    """The numbers of the prefetched lines, by the address of their range."""
    numbers = prefetched(
        num_inputs,
        num_tiles,
        (OWN, OWN_SECOND if own == 2 else 0),
        num_inputs * 128,
        (NEXT if next_panels else 0, NEXT_SECOND if next_panels == 2 else 0),
        next_bytes,
        ROWS if row_bytes else 0,
        row_bytes,
    )
    lines: dict[int, set[int]] = {}
    k = 0
    for end, address, step in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        place, offset = address >> 40 << 40, address % 2**40
        for i in range(end - k):
            due = {offset + i * step, offset + i * step + (LINE if step > LINE else 0)}
            lines.setdefault(place, set()).update(at // LINE for at in due)
        k = end % num_inputs
    assert k == 0, "a tile's spans must end with its inputs"
    return lines


def lines_of(num_bytes: int) -> set[int]:
    return set(range(-(-num_bytes // LINE)))


@pytest.mark.parametrize("num_inputs", [1, 63, 512, 1536])
@pytest.mark.parametrize("num_tiles", [2, 6, 8])
@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("next_panels", [1, 2])
@pytest.mark.parametrize("share", [0.25, 1, 2])
@pytest.mark.parametrize("row_bytes", [0, 1000])
def test_tiles_share_next_panels(
    num_inputs: int, num_tiles: int, own: int, next_panels: int, share: float, row_bytes: int
) -> None:
    num_bytes = int(num_inputs * 128 * share)
    lines = prefetched_lines(num_inputs, num_tiles, own, next_panels, num_bytes, row_bytes)
    of_each = dict.fromkeys((NEXT, NEXT_SECOND)[:next_panels], num_bytes)
    if row_bytes:
        of_each[ROWS] = row_bytes
    assert lines.keys() <= of_each.keys()
    for place, found in lines.items():
        # Steps are whole bytes, so a span may end up to a byte per input later.
        assert found <= lines_of(of_each[place] + num_inputs + LINE)
    # With fewer inputs, or more than two lines per input, a part is not prefetched.
    if num_inputs > 63 and next_panels * num_bytes / num_tiles + row_bytes < own * num_inputs * 127:
        for place, num_bytes in of_each.items():
            assert lines[place] >= lines_of(num_bytes)


def test_no_more_than_two_lines_per_input() -> None:
    lines = prefetched_lines(512, 2, next_bytes=400_000)
    assert lines[NEXT] < lines_of(400_000)
    # Two tiles.
    assert len(lines[NEXT]) == 2 * 2 * 512


@pytest.mark.parametrize(("num_inputs", "num_tiles"), [(63, 1), (512, 1), (4097, 6)])
def test_single_tiles_and_large_panels_prefetch_at_a_short_distance(
    num_inputs: int, num_tiles: int
) -> None:
    lines = prefetched_lines(num_inputs, num_tiles, next_bytes=num_inputs * 128)
    first = SHORT_DISTANCE // LINE
    assert lines == {OWN: set(range(first, first + 2 * num_inputs))}


def test_single_tiles_of_two_weights_prefetch_small_next_panels() -> None:
    num_bytes = 63 * 128
    lines = prefetched_lines(63, 1, own=2, next_panels=2, next_bytes=num_bytes)
    assert lines == {NEXT: lines_of(num_bytes), NEXT_SECOND: lines_of(num_bytes)}
    # But not large ones.
    lines = prefetched_lines(512, 1, own=2, next_panels=2, next_bytes=512 * 128)
    assert lines.keys() == {OWN, OWN_SECOND}


def test_large_next_panels_are_not_prefetched() -> None:
    assert prefetched_lines(512, 6, next_bytes=600_000) == {OWN: {0}}
    with_rows = prefetched_lines(512, 6, next_bytes=600_000, row_bytes=1000)
    assert with_rows.keys() == {ROWS}


def test_without_next_panels_nothing_is_prefetched() -> None:
    assert prefetched_lines(512, 6, next_panels=0) == {OWN: {0}}


@pytest.mark.parametrize("num_steps", [1, 63, 512, 1536])
def test_a_tile_that_prefetches_what_it_reads_goes_on_with_the_next_panel(num_steps: int) -> None:
    num_bytes = num_steps * 128
    numbers = prefetched_ahead(num_steps, OWN, num_bytes, NEXT)
    spans = list(zip([0, *numbers[::3]], numbers[::3], numbers[1::3], numbers[2::3], strict=False))
    found = [due + i * step for begin, end, due, step in spans for i in range(end - begin)]
    ahead = min(num_bytes, SHORT_DISTANCE)
    assert found == [*range(OWN + ahead, OWN + num_bytes, 128), *range(NEXT, NEXT + ahead, 128)]


def test_without_a_next_panel_a_tile_prefetches_what_is_adjacent() -> None:
    assert prefetched_ahead(512, OWN, 512 * 128, 0) == [512, OWN + SHORT_DISTANCE, 128]

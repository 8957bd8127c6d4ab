"""What products fetch while they multiply."""

import pytest
import torch

from kernels.choice import cpp_implementations

pytestmark = pytest.mark.skipif(not cpp_implementations(), reason="there is no compiler")

LINE, MOMENT = 64, 8192
OWN, OWN_SECOND, COMING, COMING_SECOND, ROWS = (n << 40 for n in range(1, 6))


def fetched(
    num_inputs: int,
    num_tiles: int,
    own: int = 1,
    coming: int = 1,
    coming_bytes: int = 0,
    row_bytes: int = 0,
) -> dict[int, set[int]]:
    """Per place the lines of it that are fetched, as their numbers."""
    numbers = torch.ops.quire.linear_fetched(
        num_inputs,
        num_tiles,
        [OWN, OWN_SECOND if own == 2 else 0],
        num_inputs * 128,
        [COMING if coming else 0, COMING_SECOND if coming == 2 else 0],
        coming_bytes,
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
    assert k == 0, "a tile's stretches end with its inputs"
    return lines


def lines_of(num_bytes: int) -> set[int]:
    return set(range(-(-num_bytes // LINE)))


@pytest.mark.parametrize("num_inputs", [1, 63, 512, 1536])
@pytest.mark.parametrize("num_tiles", [2, 6, 8])
@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("coming", [1, 2])
@pytest.mark.parametrize("share", [0.25, 1, 2])
@pytest.mark.parametrize("row_bytes", [0, 1000])
def test_tiles_share_what_comes(
    num_inputs: int, num_tiles: int, own: int, coming: int, share: float, row_bytes: int
) -> None:
    num_bytes = int(num_inputs * 128 * share)
    lines = fetched(num_inputs, num_tiles, own, coming, num_bytes, row_bytes)
    of_each = dict.fromkeys((COMING, COMING_SECOND)[:coming], num_bytes)
    if row_bytes:
        of_each[ROWS] = row_bytes
    assert lines.keys() <= of_each.keys()
    for place, fetched_lines in lines.items():
        # Steps are whole bytes, so that a stretch may end a byte per input later.
        assert fetched_lines <= lines_of(of_each[place] + num_inputs + LINE)
    # With fewer inputs, or more bytes than two lines of each, not all of it is fetched.
    if num_inputs > 63 and coming * num_bytes / num_tiles + row_bytes < own * num_inputs * 127:
        for place, num_bytes in of_each.items():
            assert lines[place] >= lines_of(num_bytes)


def test_no_more_than_two_lines_per_input() -> None:
    lines = fetched(512, 2, coming_bytes=400_000)
    assert lines[COMING] < lines_of(400_000)
    # Of both tiles.
    assert len(lines[COMING]) == 2 * 2 * 512


@pytest.mark.parametrize(("num_inputs", "num_tiles"), [(63, 1), (512, 1), (4097, 6)])
def test_who_is_alone_or_has_large_panels_reads_a_moment_ahead(
    num_inputs: int, num_tiles: int
) -> None:
    lines = fetched(num_inputs, num_tiles, coming_bytes=num_inputs * 128)
    first = MOMENT // LINE
    assert lines == {OWN: set(range(first, first + 2 * num_inputs))}


def test_panels_that_are_too_large_are_not_fetched_for_others() -> None:
    assert fetched(512, 6, coming_bytes=600_000) == {OWN: {0}}
    with_rows = fetched(512, 6, coming_bytes=600_000, row_bytes=1000)
    assert with_rows.keys() == {ROWS}


def test_where_nothing_comes_nothing_is_fetched() -> None:
    assert fetched(512, 6, coming=0) == {OWN: {0}}

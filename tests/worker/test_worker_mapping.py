"""Files in huge pages, in a process whose other threads map memory meanwhile."""

import sys
from pathlib import Path

import pytest

from worker_svc.packed import mapping
from worker_svc.packed.mapping import Mapping

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps files as on Linux")


# Private and anonymous, at the given address unless something is there (MAP_FIXED_NOREPLACE).
_UNUSED = mapping._ANONYMOUS | 0x100000


def mapped_at(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


@pytest.mark.parametrize("size", [1, 2**21, 2**24 + 5])
def test_memory_that_takes_the_place_of_the_copy_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The addresses that the copy leaves are free at once: another thread's stack may be there."""
    file = tmp_path / "weights"
    file.write_bytes(b"7" * size)
    move = mapping._mremap
    others: list[tuple[int, int]] = []

    def move_and_map(old: int, size: int, new: int) -> int:
        moved = move(old, size, new)
        others.append((mapping._mmap(old, size, 0, _UNUSED, -1), size))
        return moved

    monkeypatch.setattr(mapping, "_mremap", move_and_map)
    mapped = Mapping(file)
    mapped.copy_to_huge_pages()
    assert len(others) == -(-size // mapping._CHUNK)
    for address, length in others:
        assert mapped_at(address)
        assert mapped_at(address + length - 1)
        mapping._unmap(address, address + length)


def test_only_what_is_around_the_copy_is_unmapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"7" * (2**24 + 5))
    mapped = Mapping(file)
    reserve, move, unmap = mapping._reserve, mapping._mremap, mapping._unmap
    kept: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []
    unmapped: list[tuple[int, int]] = []

    def reserve_noted(size: int) -> int:
        begin = reserve(size)
        kept.append((begin, begin + size))
        return begin

    def move_noted(old: int, size: int, new: int) -> int:
        begin, end = kept.pop()
        expected.extend([(begin, old), (old + size, end)])
        return move(old, size, new)

    def unmap_noted(begin: int, end: int) -> None:
        unmapped.append((begin, end))
        unmap(begin, end)

    monkeypatch.setattr(mapping, "_reserve", reserve_noted)
    monkeypatch.setattr(mapping, "_mremap", move_noted)
    monkeypatch.setattr(mapping, "_unmap", unmap_noted)
    mapped.copy_to_huge_pages()
    assert len(expected) == 4
    assert unmapped == expected

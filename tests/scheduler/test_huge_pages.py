"""Huge pages for the heap."""

import asyncio
import mmap
from pathlib import Path

import pytest

from scheduler_svc import huge_pages
from scheduler_svc.huge_pages import collapse_heap, keep_in_huge_pages


@pytest.mark.slow
def test_memory_keeps_its_contents() -> None:
    size = 8 * 2**20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(bytes(range(256)) * (size // 256))
        assert collapse_heap() % (2 * 2**20) == 0
        assert memory[:] == bytes(range(256)) * (size // 256)


def test_nothing_is_done_where_they_are_disabled(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "missing")
    enabled = tmp_path / "enabled"
    monkeypatch.setattr(huge_pages, "_ENABLED", enabled)
    assert collapse_heap() == 0
    enabled.write_text("always madvise [never]\n")
    assert collapse_heap() == 0


async def test_it_is_repeated(monkeypatch) -> None:
    calls: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(huge_pages, "_FIRST_S", 0.001)
    monkeypatch.setattr(
        huge_pages, "collapse_heap", lambda: loop.call_soon_threadsafe(calls.put_nowait, None)
    )
    keeping = asyncio.create_task(keep_in_huge_pages())
    await calls.get()
    await calls.get()
    keeping.cancel()

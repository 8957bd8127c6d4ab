"""Files of the cache: written at once or not at all, by one process, within a limit."""

import fcntl
import os
import shutil
import sys
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from worker_svc.packed.cache_folder import CacheFolder
from worker_svc.packed.codec import decode, encode
from worker_svc.packed.tensor_file import DamagedFileError, TensorFile, TensorFileWriter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="maps files as on Linux")

_LARGE = 10**9
_Usage = namedtuple("_Usage", "total used free")


def content(seed: int = 0, num_rows: int = 5000) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(num_rows, 130, generator=generator),
        "panels": torch.randint(0, 255, (3, 7), dtype=torch.uint8, generator=generator),
        "norm": torch.randn(13, generator=generator).bfloat16(),
        "none": torch.empty(0, 4),
    }


def writer(seed: int = 0) -> TensorFileWriter:
    return TensorFileWriter({"seed": seed}, content(seed))


def assert_is(file: Path, seed: int) -> TensorFile:
    found, expected = TensorFile.open(file), content(seed)
    assert found.description == {"seed": seed}
    assert found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found.tensors[name].equal(tensor)
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].data_ptr() % 64 == 0
    return found


def test_what_is_written_is_found(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new" / "folder", _LARGE)
    assert folder.write("key", writer())
    assert_is(folder.path("key"), 0)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["key.packed"]


def test_a_file_of_several_chunks_in_huge_pages(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, _LARGE)
    tensors = content(1, num_rows=2**17)  # 65 MiB
    assert folder.write("key", TensorFileWriter(None, tensors))
    found = TensorFile.open(folder.path("key"))
    differences, stopped = [], threading.Event()

    def read() -> None:
        while not stopped.is_set():
            if not found.tensors["weights"].equal(tensors["weights"]):
                differences.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        found.mapping.copy_to_huge_pages()
    finally:
        stopped.set()
        reader.join()
    assert not differences
    assert str(folder.path("key")) not in Path("/proc/self/maps").read_text()
    for name, tensor in tensors.items():
        assert found.tensors[name].equal(tensor)


def test_tensors_outlive_the_file_and_its_object(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, _LARGE)
    folder.write("key", writer())
    weights = TensorFile.open(folder.path("key")).tensors["weights"]
    folder.remove("key")
    assert weights.equal(content()["weights"])
    del weights
    assert "key.packed" not in Path("/proc/self/maps").read_text()


def test_writers_at_once(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, _LARGE)
    with ThreadPoolExecutor(4) as threads:
        written = list(threads.map(lambda _: folder.write("key", writer()), range(4)))
    assert any(written)
    assert_is(folder.path("key"), 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_another_process_writes(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, _LARGE)
    partial = tmp_path / "key.partial"
    with partial.open("wb") as other, capture_logs() as logs:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not folder.write("key", writer())
        assert [line["event"] for line in logs] == ["another process writes the packed weights"]
        assert partial.exists()
    assert folder.write("key", writer())
    assert_is(folder.path("key"), 0)


def test_what_ended_processes_left_is_removed(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, _LARGE)
    for name in ("key.partial", "other.partial"):
        (tmp_path / name).write_bytes(b"x" * 10**6)
    assert folder.write("key", writer())
    assert_is(folder.path("key"), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["key.packed"]


def test_the_files_used_longest_ago_are_removed(tmp_path: Path) -> None:
    size = writer().num_bytes
    folder = CacheFolder(tmp_path, 3 * size)
    for at, key in enumerate("abc"):
        folder.write(key, writer())
        os.utime(folder.path(key), (1000 + at, 1000 + at))
    folder.touch("a")
    with capture_logs() as logs:
        folder.write("d", writer())
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]
    assert [line["file"] for line in logs] == ["b.packed"]


def test_a_file_above_the_limit_is_not_written(tmp_path: Path) -> None:
    CacheFolder(tmp_path, _LARGE).write("a", writer())
    with capture_logs() as logs:
        assert not CacheFolder(tmp_path, writer().num_bytes - 1).write("b", writer())
    assert logs[0]["reason"].startswith("more than the limit")
    assert [path.stem for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is evicted for a file that the disk does not hold then either."""
    CacheFolder(tmp_path, _LARGE).write("other", writer())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(10**12, 10**12, 10**9))
    with capture_logs() as logs:
        assert not CacheFolder(tmp_path, _LARGE).write("key", writer())
    assert [line["event"] for line in logs] == ["packed weights are not cached"]
    assert "the disk has" in logs[0]["reason"]
    assert [path.stem for path in tmp_path.iterdir()] == ["other"]


def test_files_that_are_mapped_are_not_evicted_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They free nothing while a process has them: the first one shows it."""
    folder = CacheFolder(tmp_path, _LARGE)
    for at, key in enumerate("abc"):
        folder.write(key, writer())
        os.utime(folder.path(key), (1000 + at, 1000 + at))
    free = 2**30 + writer().num_bytes // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(10**12, 10**12, free))
    with capture_logs() as logs:
        assert not folder.write("d", writer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.packed", "c.packed"]
    assert [line["event"] for line in logs] == [
        "packed weights evicted",
        "packed weights are not cached",
    ]


def test_nothing_is_evicted_for_what_another_process_writes(tmp_path: Path) -> None:
    size = writer().num_bytes
    folder = CacheFolder(tmp_path, 2 * size)
    for key in "ab":
        folder.write(key, writer())
    with (tmp_path / "c.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not folder.write("c", writer())
    assert sorted(path.name for path in tmp_path.glob("*.packed")) == ["a.packed", "b.packed"]


def test_a_disk_that_gets_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, file: Any) -> None:
        file.write(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFileWriter, "write", fail)
    with capture_logs() as logs:
        assert not CacheFolder(tmp_path, _LARGE).write("key", writer())
    assert [line["event"] for line in logs] == ["packed weights are not cached"]
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "key.packed"
    file.write_bytes(b"x" * 4096)
    with pytest.raises(DamagedFileError, match="begin"):
        TensorFile.open(file)


def test_only_known_classes_are_stored() -> None:
    with pytest.raises(TypeError, match="Path"):
        encode((1, Path()), {})
    with pytest.raises(KeyError):
        decode({"class": "Path", "arguments": ["x"]}, {})

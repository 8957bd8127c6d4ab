import os
import stat
from pathlib import Path

from quire.service.files import replace_contents


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "address"
    replace_contents(path, "first")
    with path.open() as opened:
        replace_contents(path, "second")
        assert opened.read() == "first"
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_or_device_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    replace_contents(path, "an address")
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.read(reader, 100) == b"an address"
    os.close(reader)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "address", tmp_path / "link"
    link.symlink_to(path)
    for text in ("first", "second"):
        replace_contents(link, text)
        assert link.is_symlink()
        assert path.read_text() == text

"""The C++ kernels are compiled once, whoever else wants them at the same time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.library import build_folder, complete_mark, library_file

_ROOT = Path(__file__).resolve().parents[2]


def test_each_content_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(_ROOT / "kernels" / "cpu", sources)
    monkeypatch.setattr("kernels.cpu.library._HERE", sources)
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "cache"))
    before = build_folder()
    assert before == build_folder()
    assert before.parent == tmp_path / "cache"
    (sources / "tile.h").write_text("// another\n")
    assert build_folder() != before


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
@pytest.mark.timeout(900)
def test_two_processes_that_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path))
    folder = build_folder()
    folder.mkdir()
    # As a build that was killed leaves it.
    (folder / "lock").touch()
    command = [sys.executable, "-m", "kernels.cpu.build"]
    builds = [
        subprocess.Popen(command, cwd=_ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [build.communicate()[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0]
    assert {output.split()[-1] for output in outputs} == {str(library_file(folder))}
    assert complete_mark(folder).exists()
    assert library_file(folder).stat().st_size > 0

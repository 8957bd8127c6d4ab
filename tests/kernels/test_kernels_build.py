"""The headers of the C++ kernels, and their build, also by concurrent processes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.library import SOURCE_FOLDER, build_folder, complete_mark, library_file

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = {
    path.relative_to(SOURCE_FOLDER).as_posix(): path.read_text()
    for path in SOURCE_FOLDER.rglob("*.*")
    if path.suffix in (".h", ".cpp")
}


@pytest.fixture(scope="module")
def includes() -> dict[str, set[str]]:
    """The headers that each source and header includes, by their paths in the folder."""
    # foreach_isa.h includes the header that this macro names.
    pattern = re.compile(r'^#(?:include|define QUIRE_ISA_INCLUDE) "(.+)"$', re.MULTILINE)
    return {name: set(pattern.findall(text)) for name, text in _SOURCES.items()}


def test_headers_do_not_include_each_other_in_a_circle(includes: dict[str, set[str]]) -> None:
    left = dict(includes)
    while left:
        free = {name for name, included in left.items() if not included & left.keys()}
        assert free, f"these include each other: {sorted(left)}"
        left = {name: included for name, included in left.items() if name not in free}


def test_every_header_is_included(includes: dict[str, set[str]]) -> None:
    headers = {name for name in includes if name.endswith(".h")}
    assert set().union(*includes.values()) == headers


def test_one_header_selects_instruction_sets() -> None:
    selecting = [name for name, text in _SOURCES.items() if "GCC target" in text]
    assert selecting == ["isa/foreach_isa.h"]


def test_each_content_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(_ROOT / "kernels" / "cpu", sources)
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path / "cache"))
    before = build_folder(sources)
    assert before == build_folder(sources) == build_folder()
    assert before.parent == tmp_path / "cache"
    (sources / "isa" / "vec.h").write_text("// another\n")
    assert build_folder(sources) != before


# `make kernels` compiles all sources.
_BUILD_ONE = """
import sys
from pathlib import Path
from kernels.cpu import build
build.sources = lambda: [Path(sys.argv[1])]
print(build.build())
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_two_processes_that_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path))
    folder = build_folder()
    folder.mkdir()
    # Left behind by a build that was killed.
    (folder / "lock").touch()
    source = tmp_path / "one.cpp"
    source.write_text("#include <torch/library.h>\nint one() { return 1; }\n")
    command = [sys.executable, "-c", _BUILD_ONE, str(source)]
    builds = [
        subprocess.Popen(command, cwd=_ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [build.communicate()[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0]
    assert {output.split()[-1] for output in outputs} == {str(library_file(folder))}
    assert complete_mark(folder).exists()
    assert library_file(folder).stat().st_size > 0


def test_a_library_that_does_not_load_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that another machine has compiled, with newer libraries of the system."""
    monkeypatch.setenv("QUIRE_KERNEL_CACHE", str(tmp_path))
    folder = build_folder()
    folder.mkdir()
    library_file(folder).write_text("no library")
    complete_mark(folder).touch()
    code = "from kernels.dispatch import cpp_implementations as c; print(c())"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, cwd=_ROOT, capture_output=True, text=True
    )
    assert loaded.stdout == "()\n"
    assert f"remove {folder} to compile them here" in loaded.stderr


def test_a_folder_that_cannot_be_written_is_the_reason(tmp_path: Path) -> None:
    taken = tmp_path / "cache"
    taken.write_text("a file, as on a disk that is full or read-only")
    built = subprocess.run(
        [sys.executable, "-m", "kernels.cpu.build"],
        env={**os.environ, "QUIRE_KERNEL_CACHE": str(taken)},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 1
    assert built.stdout.startswith("[Errno ")
    assert "Traceback" not in built.stderr

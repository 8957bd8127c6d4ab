"""The distribution holds what the services read at run time, and nothing that is not theirs."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"quire", "gateway_svc", "scheduler_svc", "worker_svc", "kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy of the sources, stubs left out."""
    source = tmp_path_factory.mktemp("source") / "quire"
    leave_out = shutil.ignore_patterns(".*", "build", "tests", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=leave_out)
    for generated in ("v1", "internal"):
        shutil.rmtree(source / "quire" / generated)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(source)], check=True)
    (built,) = out.glob("quire-*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_the_stubs_are_built_into_it(wheel: set[str]) -> None:
    protos = (path.relative_to(ROOT / "protos") for path in (ROOT / "protos").rglob("*.proto"))
    stubs = {
        path.with_suffix("").as_posix() + ending
        for path in protos
        for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    }
    assert len(stubs) == 48
    assert stubs <= wheel


def test_scripts_markers_and_the_page_are_in_it(wheel: set[str]) -> None:
    data = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in ("*.cpp", "*.h", "*.lua", "py.typed", "page/*")
        for path in (ROOT / package).rglob(pattern)
    }
    assert {f"{package}/py.typed" for package in PACKAGES} <= data
    assert any(name.endswith(".lua") for name in data)
    assert data <= wheel


def test_every_module_is_in_it_and_no_other(wheel: set[str]) -> None:
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in wheel if name.endswith(".py")} == modules


def test_the_command_and_the_licence_are_in_it(wheel: set[str]) -> None:
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)
    assert any(name.endswith("/entry_points.txt") for name in wheel)

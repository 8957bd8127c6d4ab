"""The choice of an implementation, also without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler

from kernels import dispatch
from kernels.dispatch import Implementation, NoSuchKernel, choose, cpp_implementations

_FLOATS = (torch.float32, torch.float32)
_ALL_CPP = tuple(implementation for implementation in Implementation if implementation.is_cpp)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> list[Implementation]:
    """What the C++ kernels can do here, as a list to be changed."""
    found: list[Implementation] = list(_ALL_CPP)
    monkeypatch.setattr(dispatch, "cpp_implementations", lambda: tuple(found))
    return found


def test_the_most_capable_serves(available: list[Implementation]) -> None:
    assert choose("cpu", _FLOATS) == Implementation.CPP_AMX
    assert choose("cpu", (torch.bfloat16, torch.float8_e5m2), "cpp") == Implementation.CPP_AMX
    available.pop()
    assert choose("cpu", _FLOATS) == Implementation.CPP_AVX512_BF16


def test_a_setting_forces_it(available: list[Implementation]) -> None:
    for implementation in set(Implementation) - {Implementation.TRITON}:
        assert choose("cpu", _FLOATS, implementation) == implementation
    available.pop()
    with pytest.raises(NoSuchKernel, match="cpp-amx: this machine runs"):
        choose("cpu", _FLOATS, "cpp-amx")


def test_what_has_no_kernel_is_torch_s_business(available: list[Implementation]) -> None:
    for device, dtypes in (("mps", _FLOATS), ("cpu", (torch.float64, torch.float32))):
        assert choose(device, dtypes) == Implementation.TORCH
        assert choose(device, dtypes, "reference") == Implementation.REFERENCE
        for setting in ("cpp", "triton"):
            with pytest.raises(NoSuchKernel, match=r"mps|float64"):
                choose(device, dtypes, setting)


def test_triton_serves_gpus_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, found in ((True, Implementation.TRITON), (False, Implementation.TORCH)):
        monkeypatch.setattr(dispatch, "HAS_TRITON", installed)
        assert choose("cuda", _FLOATS) == found
        assert choose("cuda", (torch.bfloat16, torch.float8_e4m3fn)) == found
        assert choose("cuda", (torch.float64,)) == Implementation.TORCH
        with pytest.raises(NoSuchKernel, match="do not run on cuda"):
            choose("cuda", _FLOATS, "cpp")
    with pytest.raises(NoSuchKernel, match="not installed"):
        choose("cuda", _FLOATS, "triton")


def test_triton_serves_processors_when_it_is_interpreted(
    available: list[Implementation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NoSuchKernel, match="do not run on cpu"):
        choose("cpu", _FLOATS, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("cpu", _FLOATS, "triton") == Implementation.TRITON
    assert choose("cpu", _FLOATS) == Implementation.CPP_AMX


def test_without_a_compiler_torch_serves(available: list[Implementation]) -> None:
    available.clear()
    assert choose("cpu", _FLOATS) == Implementation.TORCH
    with pytest.raises(NoSuchKernel, match="cannot be built"):
        choose("cpu", _FLOATS, "cpp")


@pytest.mark.parametrize(
    ("startup", "reason"),
    [
        pytest.param("", "there is no C++ compiler: c++ is not on the path", id="silent"),
        # As a CUDA build of torch does on a machine without a GPU.
        pytest.param(
            "print('No CUDA runtime is found', file=sys.stderr)",
            "there is no C++ compiler: c++ is not on the path",
            id="noise-on-stderr",
        ),
        pytest.param(
            "if 'kernels.cpu.build' in sys.orig_argv:\n"
            "    print('the build crashed', file=sys.stderr, flush=True)\n"
            "    os._exit(1)",
            "the build crashed",
            id="crash",
        ),
    ],
)
@pytest.mark.slow
def test_without_a_compiler_one_warning_has_the_reason(
    tmp_path: Path, startup: str, reason: str
) -> None:
    # Python imports this module at the start of every process.
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\n{startup}\n")
    program = (
        "import torch; from kernels.dispatch import choose\n"
        "for _ in range(3): print(choose('cpu', [torch.float32]))"
    )
    root = Path(__file__).resolve().parents[2]
    # No compiler is found on this path, and nothing that was built before.
    alone = {"PATH": str(tmp_path), "QUIRE_KERNEL_CACHE": str(tmp_path / "cache"), "CXX": "c++"}
    modules = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **alone, **modules},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["torch"] * 3
    assert done.stderr.count(f"no C++ kernels, so models run slowly: {reason}\n") == 1


def test_this_machine_runs_what_its_processor_has() -> None:
    found = cpp_implementations()
    assert found == _ALL_CPP[: len(found)]


@pytest.mark.skipif(shutil.which(get_cxx_compiler()) is None, reason="there is no compiler")
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Other tests compare what there is: without kernels, they would compare nothing."""
    assert cpp_implementations()

"""`python -m kernels.cpu.build`: compiles the C++ kernels, unless that has been done before.

Needs g++ and ninja. Any number of processes may do so at once: one compiles, the others wait.
"""

import fcntl
import os
import shutil
import sys
from pathlib import Path

from torch.utils.cpp_extension import get_cxx_compiler, load

from kernels.cpu.library import (
    COMPILER_FLAGS,
    LINKER_FLAGS,
    NAME,
    build_folder,
    complete_mark,
    library_file,
    sources,
)

# The lock of torch's own, which outlives a process that is killed while it compiles.
_TORCH_LOCK = "lock"


def build() -> Path:
    """The library's file. RuntimeError, with what the compiler said, if it cannot be compiled."""
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # A lock of the system's ends with the process that holds it.
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete_mark(folder).exists():
            (folder / _TORCH_LOCK).unlink(missing_ok=True)
            _compile(folder)
            complete_mark(folder).touch()
    return library_file(folder)


def _compile(folder: Path) -> None:
    compiler = get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        raise RuntimeError(f"there is no C++ compiler: {compiler} is not on the path")
    # A ninja that came with this environment is not on the path of those who call it by its name.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    load(
        name=NAME,
        sources=[str(path) for path in sources()],
        extra_cflags=list(COMPILER_FLAGS),
        extra_ldflags=list(LINKER_FLAGS),
        build_directory=str(folder),
        with_cuda=False,
        is_python_module=False,
    )
    for compiled in folder.glob("*.o"):
        compiled.unlink()


if __name__ == "__main__":
    try:
        print(build())
    except RuntimeError as error:
        sys.exit(str(error))

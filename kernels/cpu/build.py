"""Compiles the C++ kernels unless they are up to date: `python -m kernels.cpu.build`.

Requires g++ and ninja. Processes may run it concurrently: one compiles, the others wait. Prints the
library's file or, with exit status 1, the reason why there is none. The reason is on stdout because
torch and the interpreter write unrelated warnings to stderr.
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
    SOURCE_FOLDER,
    build_folder,
    complete_mark,
    library_file,
    sources,
)

# torch's lock file, which outlives a process that is killed while it compiles.
_TORCH_LOCK = "lock"


def build() -> Path:
    """Return the library's file. RuntimeError with the compiler's output if it cannot be
    compiled, OSError if its folder cannot be written."""
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # The kernel releases a file lock when its process ends.
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
    # torch looks for ninja on the path, where this environment's may not be.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    load(
        name=NAME,
        sources=[str(path) for path in sources()],
        extra_cflags=list(COMPILER_FLAGS),
        extra_ldflags=list(LINKER_FLAGS),
        extra_include_paths=[str(SOURCE_FOLDER)],
        build_directory=str(folder),
        with_cuda=False,
        is_python_module=False,
    )
    for compiled in folder.glob("*.o"):
        compiled.unlink()


if __name__ == "__main__":
    try:
        print(build())
    except (RuntimeError, OSError) as error:
        print(error)
        sys.exit(1)

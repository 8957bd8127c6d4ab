"""The worker's process: what may be installed beside it, its memory, its OpenMP threads."""

import atexit
import ctypes
import gc
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

# glibc's options of `mallopt` (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE = 2**30
# The largest value that older versions of glibc accept.
_LARGEST_THRESHOLD = 2**25
# How often an idle OpenMP thread polls for work before it sleeps: a few microseconds.
_SPIN_COUNT: Final = 100


def refuse_foreign_kernels() -> None:
    """End the process if the distribution `kernels` is installed: transformers would import its
    package or ours, whichever is found first. To be called before transformers is imported."""
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise SystemExit(
        f"quire-worker: the distribution 'kernels' {version} is installed and collides with "
        "quire's own package of that name; run `pip uninstall kernels` or use another environment"
    )


def prepare_process() -> None:
    """To be called before torch is imported and threads start.

    Few of torch's own operations run in a step, but after each of them its threads would spin for
    milliseconds on the cores that the kernels' threads need. The environment takes precedence.
    """
    prepare_memory()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))


def prepare_memory() -> None:
    """To be called before torch is imported and threads start.

    Makes torch request transparent huge pages for tensors of 2 MiB or more: weights and the cache
    are read from end to end in every step, which would miss the TLB with small pages. The
    environment takes precedence. All threads share one arena, because arenas of other threads
    return free memory regardless of `keep_freed_memory`.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if glibc := _glibc():
        glibc.mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return unused memory to the system. Does nothing where the C library is not glibc."""
    if glibc := _glibc():
        glibc.malloc_trim(0)


def keep_freed_memory() -> None:
    """To be called when the model is loaded. Returns unused memory to the system; from here on
    freed memory stays with the process, because steps allocate the same sizes again and again, and
    new memory costs a page fault per page. Does nothing where the C library is not glibc."""
    return_freed_memory()
    if glibc := _glibc():
        glibc.mallopt(_M_TRIM_THRESHOLD, _LARGE)
        if not glibc.mallopt(_M_MMAP_THRESHOLD, _LARGE):
            glibc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)


def block_import(name: str) -> None:
    """Let imports of a package that was not imported yet fail, as if it was not installed."""
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def pause_collections() -> None:
    """To be called before torch is imported. Imports create a million objects that stay, and
    Python's garbage collector would visit them all again and again: a quarter of the time of
    importing torch and transformers."""
    gc.disable()


def resume_collections() -> None:
    """To be called when the model is loaded. What is there stays: no collection visits it, which
    would hold the interpreter for a tenth of a second or more. The one at the interpreter's end
    does, without which Triton reports leaks."""
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


def host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory of this machine, or of its container if that has a lower limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def num_local_ranks(num_ranks: int) -> int:
    """How many of a worker's ranks run on this host: all, unless torchrun has started them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def local_rank(rank: int, num_ranks: int) -> int:
    """A rank's number among those of its host: torchrun's, else by its number among all."""
    return int(os.environ.get("LOCAL_RANK", rank % num_local_ranks(num_ranks)))


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None

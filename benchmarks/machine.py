"""Description of the machine and the software versions of a benchmark."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire.launcher.redis import find_redis_server

_NUM_SPINS = 10
_SPIN_STEPS = 100_000
# As Linux names them.
_INSTRUCTION_SETS = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_int8", "amx_bf16", "amx_fp16"),
)
_PACKAGES = ("grpcio", "protobuf", "redis", "numpy")


def description() -> dict[str, object]:
    """Return machine, cores, versions and commit, for the results file."""
    return {
        "processor": _processor(),
        "instruction_sets": instruction_sets(_cpu_info("flags")),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "redis_server": _redis_server(),
        "commit": _commit(),
        **moment(),
    }


def moment() -> dict[str, object]:
    """Return indicators of the machine's present load."""
    return {"load_average": os.getloadavg()[0], "spin_ms": _spin_ms()}


def _spin_ms() -> float:
    """Return the least milliseconds of a fixed loop: shows whether the machine is slow now."""
    return min(_timed_ms(_spin) for _ in range(_NUM_SPINS))


def _timed_ms(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start_s)


def _spin() -> int:
    total = 0
    for number in range(_SPIN_STEPS):
        total += number
    return total


def instruction_sets(flags: str | None) -> str:
    """Return those of the processor's flags that the speed of products depends on."""
    found = (flags or "").split()
    return " ".join(flag for flag in _INSTRUCTION_SETS if flag in found)


def _processor() -> str:
    return _cpu_info("model name") or platform.machine()


def _cpu_info(key: str) -> str | None:
    """Return the first value of a key in `/proc/cpuinfo`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _redis_server() -> str | None:
    binary = find_redis_server()
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\S+)", shown)
    return found and found[1]


def _commit() -> str | None:
    """Return the commit, followed by a plus sign if tracked files differ from it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + "+" * bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    root = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()

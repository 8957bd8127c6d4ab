"""CPU time and memory of a process from /proc."""

import contextlib
import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU time in seconds of all threads, user and system."""
    # The second field is a name that may contain spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def peak_rss_mb(pid: int) -> float:
    """Return the peak resident memory, in units of 10^6 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ProcessLookupError(f"process {pid} has exited")


def num_sockets(pid: int) -> int:
    """Return the number of open sockets, those that listen included."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # One may be closed meanwhile.
        with contextlib.suppress(OSError):
            found += os.readlink(descriptor).startswith("socket:")
    return found

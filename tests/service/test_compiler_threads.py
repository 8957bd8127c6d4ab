"""Threads for formats where the system refuses one."""

import subprocess
import sys

import pytest

# The address space has room for the stack of the first thread and not for that of the second one.
_PROGRAM = """
import resource
from pathlib import Path

from quire.service.grammars import _STACK_BYTES, compiler_threads

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + _STACK_BYTES * 3 // 2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    compiler_threads(2, "formats")
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_gets_only_some_of_the_threads_can_end() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=20
    )
    assert ended.stdout == "can't start new thread\n"
    assert ended.returncode == 0, ended.stderr

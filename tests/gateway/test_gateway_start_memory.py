"""The start of a gateway that the system refuses memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from quire.client.health_probe import NOT_SERVING, health_of

_ROOT = Path(__file__).resolve().parents[2]

# The address space has room for the stack of the first thread for formats, and not for that of the
# second one.
_PROGRAM = """
import resource
from pathlib import Path

from gateway_svc.__main__ import main
from quire.service.grammars import _STACK_BYTES

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + _STACK_BYTES * 3 // 2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_the_reason_is_reported(tmp_path: Path, sockets: Path) -> None:
    address, log = f"unix:{sockets}/gateway.sock", tmp_path / "log"
    gateway = started(log, "--listen", address, "--scheduler", f"unix:{sockets}/none.sock")
    try:
        await until(lambda: "can't start new thread" in log.read_text(), "the reason in the log")
        assert health_of(address, "tokenizer", 5.0) == NOT_SERVING
    finally:
        gateway.terminate()
        gateway.wait(20)
    assert gateway.returncode == 0


def started(log: Path, *flags: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", _PROGRAM, *flags, "--model", str(_ROOT / "demo" / "model")]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)

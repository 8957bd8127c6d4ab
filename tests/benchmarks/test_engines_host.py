"""A child process that executes commands, and its failures."""

import asyncio
import sys
from pathlib import Path

import pytest
from waiting import until

from benchmarks.engines.host import EngineError, Host

CHILD = """
import os, sys
from benchmarks.engines.child import job, serve

given = job()
print("printed before it is ready", file=sys.stderr)
if given.get("breaks"):
    raise SystemExit("no such model")

def noisy():
    print("a library's output")
    return given["number"]

def seen():
    return sorted(name for name in os.environ if name.startswith(("QUIRE_", "EXTRA")))

serve({"run": noisy, "die": lambda: os._exit(3), "seen": seen})
"""


@pytest.fixture
def start(tmp_path):
    def begin(**job: object) -> Host:
        command = [sys.executable, "-c", CHILD]
        return Host("child", command, job, tmp_path, {"EXTRA": "1"})

    return begin


def test_a_command_can_be_repeated_until_the_context_ends(start):
    with start(number=7) as host:
        assert [host.call("run"), host.call("run")] == [7, 7]
        assert host.start_s > 0
    with pytest.raises((EngineError, ValueError)):
        host.call("run")


def test_the_child_does_not_inherit_settings(start, monkeypatch):
    monkeypatch.setenv("QUIRE_WORKER_BLOCK_SIZE", "99")
    with start() as host:
        assert host.call("seen") == ["EXTRA"]


def test_an_error_at_the_start_includes_the_log(start):
    with pytest.raises(EngineError, match=r"child has ended; its log ends:(.|\n)*no such model"):
        start(breaks=True)


def test_a_child_that_exits_is_an_error(start):
    with start() as host, pytest.raises(EngineError, match="child has ended"):
        host.call("die")


STARTER = """
import sys
from pathlib import Path
from benchmarks.engines.host import Host

child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
Host("child", [sys.executable, "-c", child], {}, Path(sys.argv[1]), {})
"""


async def test_a_child_that_starts_ends_with_a_killed_parent(tmp_path: Path) -> None:
    """It does not read stdin yet, so it does not see its end."""
    log = tmp_path / "child.log"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", STARTER, str(tmp_path))
    await until(lambda: log.exists() and log.read_text().endswith("\n"), "the child's start")
    parent.kill()
    await parent.wait()
    child = int(log.read_text())
    await until(lambda: _has_ended(child), "the child's end")


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    # Its new parent may never wait for it.
    return stat.rpartition(")")[2].split()[0] == "Z"

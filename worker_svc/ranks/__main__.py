"""`python -m worker_svc.ranks`: a follower, started by rank 0, which writes the settings to its
standard input."""

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
from typing import Final

from worker_svc.service.process import pause_collections, prepare_process
from worker_svc.settings import WorkerSettings

_PR_SET_PDEATHSIG: Final = 1
_STOP_S: Final = 1.0


def main() -> None:
    if sys.platform == "linux":
        # Also where this process is stopped and cannot see the end of the pipe.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Of rank 0, unless it has ended before.
    line = sys.stdin.buffer.readline()
    if not line:
        return
    settings = WorkerSettings(_cli_parse_args=[], **json.loads(line))  # type: ignore[call-arg]
    threading.Thread(target=_end_with_pipe, name="pipe", daemon=True).start()
    pause_collections()
    prepare_process()
    # Without the interpreter's end, which takes a second and for which rank 0 would wait.
    os._exit(importlib.import_module("worker_svc.ranks.following").follow(settings, is_child=True))


def _end_with_pipe() -> None:
    """End this process when rank 0 has closed the pipe, or has ended."""
    # Past Python's buffer, whose lock the interpreter would wait for when it ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    # Before it closes the pipe, rank 0 stops this process, unless it is lost.
    threading.Event().wait(_STOP_S)
    os._exit(0)


if __name__ == "__main__":
    main()

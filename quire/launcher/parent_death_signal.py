"""Script that runs a command which is killed when the thread that started it ends.

    parent_death_signal.py PARENT_PID COMMAND...

Sets Linux's parent-death signal to SIGKILL, then replaces itself by COMMAND, which keeps the
process id and the signal. Imports nothing of Quire, to start in milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the signal was set.
    if os.getppid() == parent_pid:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

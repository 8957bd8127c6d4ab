"""Run as a script between a parent and its child: ties the child's life to the parent's.

    tether.py PARENT_PID COMMAND...

Asks Linux to kill this process when the thread that started it ends, then becomes COMMAND, which
keeps both the process id and the tie. It imports nothing of Quire, to be gone in milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the tie was made.
    if os.getppid() == parent_pid:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

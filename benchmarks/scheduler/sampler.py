"""A sampling profiler: records the main thread's stack at each tick of the process's CPU clock.

Ticks are the kernel's (1 to 10 ms). CPU time of C threads causes ticks, too; it is attributed to
the call in which the main thread waits.
"""

import signal
from collections import Counter
from types import FrameType

_INTERVAL_S = 0.001


class Sampler:
    """Must be created on the main thread; `start` and `stop` may be called on any."""

    def __init__(self) -> None:
        self._lines: Counter[str] = Counter()
        self._functions: Counter[str] = Counter()
        signal.signal(signal.SIGPROF, self._tick)

    def start(self) -> None:
        self._lines.clear()
        self._functions.clear()
        signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)

    def stop(self) -> dict[str, list[tuple[str, int]]]:
        """Return ticks by the line that ran, and by function on the stack."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        return {"lines": self._lines.most_common(), "functions": self._functions.most_common()}

    def _tick(self, _number: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self._lines[f"{_name(frame)}:{frame.f_lineno}"] += 1
        seen = set()
        caller: FrameType | None = frame
        while caller is not None:
            seen.add(_name(caller))
            caller = caller.f_back
        self._functions.update(seen)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(code.co_filename.rsplit('/', 3)[-3:])}:{code.co_qualname}"

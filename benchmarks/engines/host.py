"""The outer end of such a process: it starts it, asks it, ends it."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

_STOP_S = 20.0
_LOG_LINES = 15


class EngineError(RuntimeError):
    """A system that cannot be measured. The message has the last lines of its log."""


class Host:
    """One system in a process of its own, ready to run the work as often as it is asked to."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        job: Mapping[str, object],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Returns when the system is ready. `folder` receives its job and its log. EngineError if
        it does not start."""
        self.name = name
        self._log = folder / f"{name}.log"
        job_file = folder / f"{name}.json"
        job_file.write_text(json.dumps(job))
        began_s = time.monotonic()
        read_end, write_end = os.pipe()
        self._answers = os.fdopen(read_end)
        with self._log.open("w") as log, os.fdopen(write_end, "w"):
            self._process = subprocess.Popen(
                [*command, str(job_file), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                text=True,
                # Settings of the caller's environment are not what is measured.
                env={**_without_settings(os.environ), **environment},
                # A Ctrl-C in the terminal is ours: the child ends when its stdin does.
                process_group=0,
            )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        # Until it was ready, its imports included.
        self.start_s = time.monotonic() - began_s

    def ask(self, command: str) -> Any:
        """EngineError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # It says why where its answer would be.
        return self._answer()

    def close(self) -> None:
        """Has the process end; it is killed if it takes long."""
        try:
            self._process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            # It may still have something to say.
            self.close()
            raise EngineError(f"{self.name} has ended; {log_end(self._log)}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if not k.startswith("QUIRE_")}


def log_end(log: Path) -> str:
    """What a process said last, to follow the words of an error."""
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n    ".join(["its log ends:", *lines])

"""Starts a child process with one system, sends commands to it, and stops it."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from quire.launcher.child import with_death_signal

_STOP_S = 20.0
_LOG_LINES = 15


class EngineError(RuntimeError):
    """A system cannot be measured. The message contains the last lines of its log."""


class Host:
    """One system in a child process, which runs the work on command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        job: Mapping[str, object],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Return when the system is ready. `folder` receives its job and its log. EngineError if
        it does not start."""
        self.name = name
        self._log = folder / f"{name}.log"
        job_file = folder / f"{name}.json"
        job_file.write_text(json.dumps(job))
        began_s = time.monotonic()
        read_end, write_end = os.pipe()
        self._responses = os.fdopen(read_end)
        with self._log.open("w") as log, os.fdopen(write_end, "w"):
            self._process = subprocess.Popen(
                with_death_signal([*command, str(job_file), str(write_end)]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                text=True,
                # Keep the caller's Quire settings out of the measurement.
                env={**_without_settings(os.environ), **environment},
                # Ctrl-C goes to the parent only: the child ends when its stdin is closed.
                process_group=0,
            )
        try:
            self._response()
        except BaseException:
            self.close()
            raise
        # Time to readiness, including imports.
        self.start_s = time.monotonic() - began_s

    def call(self, command: str) -> Any:
        """Execute a command and return its result. EngineError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # Reading the response raises the EngineError.
        return self._response()

    def close(self) -> None:
        """Close the child's stdin so that it ends; kill it after a timeout."""
        try:
            self._process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._responses.close()

    def _response(self) -> Any:
        line = self._responses.readline()
        if not line:
            # Wait for the end of its log.
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
    """Return the last lines of a log, to be appended to an error message."""
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n    ".join(["its log ends:", *lines])

"""The event log of a run: printed, and written to a file."""

from datetime import UTC, datetime
from pathlib import Path


class Events:
    """Writes lines with UTC timestamps, as the logs of the services have them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, message: str) -> None:
        line = f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {message}"
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

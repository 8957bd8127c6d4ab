"""What happens in a run, as it happens: on the terminal, and in a file."""

from datetime import UTC, datetime
from pathlib import Path


class Events:
    """Lines with their time, which is also that of the services' logs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, what: str) -> None:
        line = f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {what}"
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

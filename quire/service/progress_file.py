"""The file in which a service reports what it does at its start, for the process that waits."""

from dataclasses import dataclass
from pathlib import Path

from quire.service.files import replace_contents


@dataclass(frozen=True)
class Progress:
    """A step of a start."""

    # "downloading"
    action: str
    # "1.2 of 3.4 GiB"; empty if it is unknown.
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.action}, {self.detail}" if self.detail else self.action


def write_progress(file: Path, progress: Progress) -> None:
    """Replace the file, so that a reader never finds a part of it."""
    replace_contents(file, f"{progress.action}\n{progress.detail}")


def read_progress(file: Path) -> Progress | None:
    """None if nothing has been reported."""
    try:
        action, _, detail = file.read_text().partition("\n")
    except FileNotFoundError:
        return None
    return Progress(action, detail)

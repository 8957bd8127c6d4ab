"""Stop strings over streamed text: nothing of one ever gets out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Passed:
    """Text that may go out, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopFinder:
    """Finds the stop string that is complete first; of those that end together, the longest.

    So what is found does not depend on how the text was cut into deltas. Text that may be the
    beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Passed:
        """After a stop was told there is nothing more to push."""
        if not self._stops:
            return Passed(text)
        text = self._held + text
        found = self._first(text)
        if found is not None:
            at, stop = found
            self._held = ""
            return Passed(text[:at], stop)
        certain = min(_beginning(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return Passed(text[:certain])

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def _beginning(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that begins `stop`; the length of `text` if none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)

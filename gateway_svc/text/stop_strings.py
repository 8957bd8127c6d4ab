"""Finds stop strings in streamed text, so that no part of one is emitted."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckedText:
    """Text that may be emitted, and the stop string that follows it, if one does."""

    text: str
    stop: str | None = None


class StopChecker:
    """Finds the stop string that is complete first; of those that end together, the longest.

    So the result does not depend on how the text is split into deltas. Text that may be the
    beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        # The characters of the held text in which no stop string may end.
        self._num_exempt = 0

    def push(self, text: str, may_stop: bool = True) -> CheckedText:
        """Append text and return what may be emitted. Not called after a stop string. No stop
        string ends in a text that may not stop; one that begins in it may end later."""
        if not self._stops:
            return CheckedText(text)
        text = self._held + text
        if not may_stop:
            self._num_exempt = len(text)
        found = self._first(text)
        if found is not None:
            at, stop = found
            self._held = ""
            return CheckedText(text[:at], stop)
        certain = min(_partial_start(text, stop) for stop in self._stops)
        self._held = text[certain:]
        self._num_exempt = max(0, self._num_exempt - certain)
        return CheckedText(text[:certain])

    def flush(self) -> str:
        """Return the text held back, at the end of the choice."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        exempt = self._num_exempt
        matches = [
            (at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, exempt - len(stop) + 1))) >= 0
        ]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def _partial_start(text: str, stop: str) -> int:
    """Index of the longest suffix of `text` that is a prefix of `stop`; len(text) if none is."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)

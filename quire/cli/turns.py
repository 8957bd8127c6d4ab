"""Texts that are written at once, for a person who reads one after the other."""

from collections.abc import Callable

from quire.outputs import CompletionDelta, CompletionOutput

_Part = CompletionDelta | CompletionOutput


class Turns:
    """Tells each completion in its turn: the first as it is written, the next when it has ended.

    What comes of later ones waits for their turns. Where there are several, each has a heading.
    """

    def __init__(self, num_texts: int, tell: Callable[[str], object]) -> None:
        self._num_texts = num_texts
        self._tell = tell
        # The index of the one that is told, and whether any of it has been.
        self._turn = 0
        self._has_begun = False
        self._waiting: dict[int, list[_Part]] = {}

    def add(self, part: _Part) -> None:
        self._waiting.setdefault(part.index, []).append(part)
        while parts := self._waiting.pop(self._turn, None):
            for waiting in parts:
                self._tell_part(waiting)

    def _tell_part(self, part: _Part) -> None:
        if not self._has_begun and self._num_texts > 1:
            apart = "\n" if self._turn else ""
            self._tell(f"{apart}[{self._turn + 1}/{self._num_texts}]\n")
        self._has_begun = part.finish_reason is None
        self._tell(part.text)
        if part.finish_reason is not None:
            self._tell("\n")
            self._turn += 1

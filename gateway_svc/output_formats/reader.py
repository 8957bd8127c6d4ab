"""Text that arrives in parts, and reading it as if it were there as a whole."""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

# A part of a parser. It yields where it needs more text, and returns its result.
Step = Generator[None, None, T]

_SPACE = " \t\r\n"


class Reader:
    """The input of a parser.

    What is consumed depends only on the text so far: every method consumes as much as is certain,
    and waits otherwise.
    """

    def __init__(self) -> None:
        # Not consumed yet.
        self.text = ""
        # No text follows.
        self.has_ended = False
        # Consumed since `mark`, in parts.
        self._consumed: list[str] = []

    def mark(self) -> None:
        """Begin to record what is consumed."""
        self._consumed = []

    @property
    def since_mark(self) -> str:
        return "".join(self._consumed)

    def put_back(self) -> None:
        """Make what was consumed since the mark unread."""
        self.text = self.since_mark + self.text
        self.mark()

    def take(self, length: int) -> str:
        taken, self.text = self.text[:length], self.text[length:]
        self._consumed.append(taken)
        return taken

    def more(self) -> Step[bool]:
        """Wait for more text; False if none follows."""
        length = len(self.text)
        while len(self.text) == length and not self.has_ended:
            yield
        return len(self.text) > length

    def peek(self) -> Step[str]:
        """The next character; empty at the end of the text."""
        while not self.text and not self.has_ended:
            yield
        return self.text[:1]

    def accept(self, *words: str) -> Step[str | None]:
        """Consume the first of these words that the text begins with; None if it begins with none
        of them, or ends before that is certain."""
        while True:
            found = next((word for word in words if self.text.startswith(word)), None)
            if found is not None:
                self.take(len(found))
                return found
            if not any(word.startswith(self.text) for word in words):
                return None
            if not (yield from self.more()):
                return None

    def skip_space(self) -> Step[str]:
        """Consume and return white space."""
        skipped = ""
        while (yield from self.peek()) and self.text[0] in _SPACE:
            skipped += self.take(len(self.text) - len(self.text.lstrip(_SPACE)))
        return skipped

    def while_in(self, characters: str) -> Step[str]:
        """Consume and return characters of this set."""
        found = ""
        while (yield from self.peek()) and self.text[0] in characters:
            found += self.take(len(self.text) - len(self.text.lstrip(characters)))
        return found

    def until(self, markers: Sequence[str], emit: Callable[[str], object]) -> Step[bool]:
        """Pass on the text before the first of these markers, and stop in front of it. False if
        the text ends without one."""
        while True:
            found = [at for marker in markers if (at := self.text.find(marker)) >= 0]
            if found:
                emit(self.take(min(found)))
                return True
            if self.has_ended:
                emit(self.take(len(self.text)))
                return False
            emit(self.take(_num_certain(self.text, markers)))
            yield


def _num_certain(text: str, markers: Sequence[str]) -> int:
    """The length of the text before what may be the start of a marker."""
    longest = max(map(len, markers), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at
    return len(text)

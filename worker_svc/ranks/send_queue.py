"""Tensors that are on their way to other ranks."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class SendQueue:
    """Keeps tensors until they are sent, which Gloo does when the other rank receives. So a sender
    may go on while others are busy, but not by more than `most` sends."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sends: deque[tuple[Sequence[Any], Sequence[Tensor]]] = deque()

    def add(self, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Add a send, whose tensors must not change any more. RuntimeError if one has failed."""
        self._sends.append((works, tensors))
        while len(self._sends) > self._most:
            self._wait_for_oldest()

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._sends:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        works, _ = self._sends.popleft()
        for work in works:
            work.wait()

"""Keeps what was made for the last batch of rows."""

from collections.abc import Callable
from typing import Generic, TypeVar

from worker_svc.plan.inputs import Ints

T = TypeVar("T")


class BatchCache(Generic[T]):
    """Makes a value for the lines and rows of a batch. Successive steps mostly run the same rows,
    so the last value is kept."""

    def __init__(self, make: Callable[[Ints, Ints], T]) -> None:
        self._make = make
        self._last: tuple[bytes, bytes, T] | None = None

    def of(self, lines: Ints, rows: Ints) -> T:
        """The value for `rows[i]` in line `lines[i]`."""
        of_lines, of_rows = lines.tobytes(), rows.tobytes()
        if self._last is None or self._last[:2] != (of_lines, of_rows):
            self._last = of_lines, of_rows, self._make(lines, rows)
        return self._last[2]

    def clear(self) -> None:
        """To be called when a row has changed."""
        self._last = None

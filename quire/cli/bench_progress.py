"""How far a load has come, as a bar on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

from quire.bench.load import Listener
from quire.bench.trace import Trace


class Progress:
    """Shows nothing where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def __call__(self, server: str, num_requests: int) -> Iterator[Listener]:
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[tokens]:,} tokens"),
            progress.TimeElapsedColumn(),
            console=self._console,
            # Drawing takes time from what is measured beside it.
            refresh_per_second=4,
            disable=not self._console.is_terminal,
        )
        task = bar.add_task(server, total=num_requests, tokens=0)
        counts = _Counts()

        def listen(trace: Trace) -> None:
            counts.add(trace)
            bar.update(task, completed=counts.num_ended, tokens=counts.num_tokens)

        with bar:
            yield listen


class _Counts:
    """What has come so far."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.num_tokens = 0

    def add(self, trace: Trace) -> None:
        """Of a message, or of the request's end, which `ended_s` tells."""
        if trace.ended_s:
            self.num_ended += 1
        else:
            self.num_tokens += trace.counts[-1]

"""The command that runs a recording again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.app import integer, one_line_errors
from quire.cli.worker_target import worker_channel, worker_target
from quire.errors import QuireError
from quire.launcher.errors import LaunchError
from quire.recording import read_hello
from quire.replay import Outcome, replay

_DIFFERENT = 1
_CANNOT = 2
_MOST_SHOWN = 10


@one_line_errors()
def replay_recording(
    file: Annotated[Path, typer.Argument(help="What a worker wrote with --record.")],
    worker: Annotated[
        str | None,
        typer.Option(help="A worker that nobody else drives; a simulated one if absent."),
    ] = None,
    depth: Annotated[int, typer.Option(parser=integer, help="Plans under way at once.")] = 2,
) -> None:
    """Runs the plans of a recording again and compares what they give.

    Exits with 0 if all is as recorded, with 1 if not, with 2 if it cannot be run.
    """
    with _status_if_impossible():
        hello = read_hello(file)
        with worker_target(worker, hello, file) as target, worker_channel(target) as channel:
            tally = _Tally()
            for outcome in replay(file, target, channel, depth):
                tally.add(outcome)
    typer.echo(tally.summary(worker or "a simulated worker"))
    if tally.num_different:
        raise typer.Exit(_DIFFERENT)


class _Tally:
    """Counts outcomes, and shows the first that differ."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self.num_different = 0

    def add(self, outcome: Outcome) -> None:
        self.num_steps += 1
        if outcome.result is not None:
            self.num_tokens += len(outcome.result.sampled_token_ids)
        if (difference := outcome.difference) is None:
            return
        self.num_different += 1
        if self.num_different <= _MOST_SHOWN:
            typer.echo(f"step {outcome.recorded.plan.step}: {difference}")

    def summary(self, where: str) -> str:
        verdict = f"{self.num_different} steps differ" if self.num_different else "all as recorded"
        return f"{self.num_steps} steps, {self.num_tokens} tokens on {where}: {verdict}"


@contextmanager
def _status_if_impossible() -> Iterator[None]:
    try:
        yield
    except (QuireError, LaunchError, ValueError, OSError) as error:
        typer.echo(f"quire: {error}", err=True)
        raise typer.Exit(_CANNOT) from error

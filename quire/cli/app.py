"""What all commands share: the application, the server they talk to, how they fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from quire.errors import QuireError
from quire.launcher.errors import LaunchError

_INTERRUPTED = 130

app = typer.Typer(
    name="quire",
    help="Serves language models, and asks the models that are served.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def number(value: str) -> float:
    """Parses an option; unlike the parser that it replaces, it shows the value it refuses."""
    try:
        return float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a number") from error


def integer(value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not an integer") from error


Target = Annotated[
    str,
    typer.Option(envvar="QUIRE_TARGET", help="The server: host:port or unix:/path."),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The served model, where there are several.")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", parser=number, help="Seconds after which the call ends."),
]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A failure is one clear message and exit status 1; an interrupt is status 130."""
    try:
        yield
    except (QuireError, LaunchError, ValueError, OSError) as error:
        typer.echo(f"quire: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(_INTERRUPTED) from interrupt

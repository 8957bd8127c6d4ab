"""What all commands share: the application, the server they talk to, how they fail."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from quire.arguments import deadline
from quire.errors import QuireError
from quire.launcher.errors import LaunchError

_INTERRUPTED = 130
# What a shell shows of a program that SIGPIPE has ended.
_NOBODY_READS = 141

app = typer.Typer(
    name="quire",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"quire {importlib.metadata.version('quire')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serves language models, and asks the models that are served."""


def number(value: str) -> float:
    """Parses an option; unlike the parser that it replaces, it shows the value it refuses."""
    try:
        return float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a number") from error


def seconds(value: str) -> float | None:
    """A time limit, which is none if it is infinite."""
    try:
        return deadline("seconds", number(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def integer(value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not an integer") from error


Target = Annotated[
    str,
    typer.Option(envvar="QUIRE_TARGET", help="The server: host:port or unix:/path."),
]
Targets = Annotated[
    str,
    typer.Option(
        "--target",
        envvar="QUIRE_TARGET",
        help="The server: host:port or unix:/path; several gateways with commas between them.",
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        "--resume-timeout",
        parser=number,
        help="Seconds for which what breaks is tried again, without a new token; 0: not at all.",
    ),
]
SchedulerTarget = Annotated[
    str, typer.Option("--target", help="The scheduler: host:port or unix:/path.")
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The served model, where there are several.")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", parser=seconds, help="Seconds after which the call ends."),
]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A failure is one clear message and exit status 1; an interrupt is status 130, and an output
    that nobody reads any more status 141."""
    try:
        yield
    except BrokenPipeError as broken:
        # What is still buffered goes nowhere, instead of failing again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_NOBODY_READS) from broken
    except (QuireError, LaunchError, ValueError, OSError) as error:
        typer.echo(f"quire: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(_INTERRUPTED) from interrupt

"""The application, and what its commands share: options, their parsers, error messages."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from quire.cli.environment import refuse_unknown_variables
from quire.client.arguments import deadline
from quire.client.errors import QuireError
from quire.client.operations import DEFAULT_SCHEDULER
from quire.launcher.errors import LaunchError
from quire.service.tls import TLS

INTERRUPTED = 130
# The status that a shell reports for a program that SIGPIPE has ended.
_CLOSED_PIPE = 141

app = typer.Typer(
    name="quire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"quire {importlib.metadata.version('quire')}")
        raise typer.Exit


def _tls_option(description: str, name: str) -> Any:
    return typer.Option(
        f"--{name}",
        envvar=f"QUIRE_{name.upper().replace('-', '_')}",
        help=description,
        rich_help_panel="TLS of the server that a command connects to",
    )


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    tls: Annotated[
        bool, _tls_option("Connect with TLS and trust public authorities.", "tls")
    ] = False,
    tls_ca: Annotated[
        Path | None, _tls_option("Connect with TLS and trust this file's authorities.", "tls-ca")
    ] = None,
    tls_cert: Annotated[
        Path | None, _tls_option("The client's certificate, if servers ask for one.", "tls-cert")
    ] = None,
    tls_key: Annotated[
        Path | None, _tls_option("The key of the client's certificate.", "tls-key")
    ] = None,
    tls_server_name: Annotated[
        str | None,
        _tls_option("The name in the server's certificate, if not the host.", "tls-server-name"),
    ] = None,
) -> None:
    """Serve language models and send requests to them."""
    with report_errors(2):
        refuse_unknown_variables(os.environ)
    context.obj = None
    if tls or tls_ca is not None:
        with report_errors(2):
            context.obj = TLS(tls_ca, tls_cert, tls_key, tls_server_name)
    elif tls_cert or tls_key or tls_server_name:
        raise typer.BadParameter("the options of TLS need --tls or --tls-ca")


def given_tls(context: typer.Context) -> TLS | None:
    """The TLS that the options before a command ask for; None without."""
    tls: TLS | None = context.find_root().obj
    return tls


def number(value: str) -> float:
    """Parse a number; unlike typer's own parser, its error message has the value."""
    try:
        return float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not a number") from error


def integer(value: str) -> int:
    """Parse an integer; unlike typer's own parser, its error message has the value."""
    try:
        return int(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not an integer") from error


def seconds(value: str) -> float | None:
    """Parse a time limit; infinity is None."""
    try:
        return deadline("seconds", number(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def number_option(description: str, *flags: str) -> Any:
    return typer.Option(*flags, parser=number, help=description)


def integer_option(description: str, *flags: str) -> Any:
    return typer.Option(*flags, parser=integer, help=description)


Target = Annotated[
    str, typer.Option(envvar="QUIRE_TARGET", help="The server: host:port or unix:/path.")
]
Targets = Annotated[
    str,
    typer.Option(
        "--target",
        envvar="QUIRE_TARGET",
        help="The server: host:port or unix:/path; several gateways are separated by commas.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="QUIRE_API_KEY",
        show_envvar=True,
        help="The API key. The environment variable keeps it out of the list of processes.",
    ),
]
ResumeTimeout = Annotated[
    float,
    number_option(
        "Seconds for which failed calls are retried without a new token; 0: never.",
        "--resume-timeout",
    ),
]
SchedulerTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="The scheduler: host:port or unix:/path; that of the one 'quire serve' that runs on "
        f"this machine, or {DEFAULT_SCHEDULER} without one.",
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The served model, required if there are several.")
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", parser=seconds, help="Deadline of the call in seconds.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the services' logs.")]


def opened_stdin() -> TextIO:
    """Standard input. ValueError if the program was started without one."""
    # Python's own type does not say that it is None then.
    stdin: TextIO | None = sys.stdin
    if stdin is None:
        raise ValueError("standard input is closed")
    return stdin


def _message(error: Exception) -> str:
    """The text of an error; that of the system without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextmanager
def report_errors(status: int = 1) -> Iterator[None]:
    """Print a failure as one message and exit with `status`; an interrupt exits with 130, a
    closed output with 141."""
    try:
        yield
    except BrokenPipeError as broken:
        # Discards buffered output, which would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_CLOSED_PIPE) from broken
    except (QuireError, LaunchError, ValueError, OSError) as error:
        typer.echo(f"quire: {_message(error)}", err=True)
        raise typer.Exit(status) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED) from interrupt

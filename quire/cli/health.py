"""The command that containers and scripts ask before they rely on a service."""

from typing import Annotated

import typer

from quire.cli.app import Target, one_line_errors, seconds
from quire.probe import is_serving
from quire.targets import DEFAULT_TARGET


@one_line_errors()
def health(
    target: Target = DEFAULT_TARGET,
    service: Annotated[
        str, typer.Option(help='"ready", a gRPC service, or "" for the process alone.')
    ] = "ready",
    timeout: Annotated[
        float | None, typer.Option(parser=seconds, help="Seconds to wait for an answer.")
    ] = 5.0,
) -> None:
    """Exits with 0 if the service at TARGET is serving, else with 1."""
    if not is_serving(target, service, timeout):
        typer.echo(f"quire: {service or 'the process'} at {target} is not serving", err=True)
        raise typer.Exit(1)
    typer.echo("serving")

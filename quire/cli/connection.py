"""The client of commands that use a running server."""

import typer

from quire.client.client import Client
from quire.client.errors import QuireError
from quire.service.tls import TLS


def connect(target: str, api_key: str | None, tls: TLS | None, resume_timeout_s: float) -> Client:
    """A client that reports the first retried failure on stderr."""
    is_reported = False

    def report(error: QuireError) -> None:
        nonlocal is_reported
        if not is_reported:
            typer.echo(f"quire: {error}; trying again", err=True)
        is_reported = True

    return Client(
        target, api_key=api_key, tls=tls, resume_timeout_s=resume_timeout_s, on_break=report
    )

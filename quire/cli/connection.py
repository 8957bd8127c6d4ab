"""The client of commands that use a running server."""

import typer

from quire.client.client import Client
from quire.client.errors import QuireError
from quire.service.tls import TLS


class RetryReport:
    """Reports on stderr the first failure that is retried."""

    def __init__(self) -> None:
        self._is_reported = False

    def __call__(self, error: QuireError) -> None:
        if not self._is_reported:
            typer.echo(f"quire: {error}; trying again", err=True)
        self._is_reported = True

    def reset(self) -> None:
        """Report the next failure as well."""
        self._is_reported = False


def connect(
    target: str,
    api_key: str | None,
    tls: TLS | None,
    resume_timeout_s: float,
    report: RetryReport | None = None,
) -> Client:
    return Client(
        target,
        api_key=api_key,
        tls=tls,
        resume_timeout_s=resume_timeout_s,
        on_break=report or RetryReport(),
    )

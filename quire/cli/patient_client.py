"""A client that tells a person why there is a pause."""

import typer

from quire.client import Client
from quire.errors import QuireError


def patient_client(target: str, resume_timeout_s: float) -> Client:
    """Says on stderr what broke, the first time."""
    told = False

    def tell(error: QuireError) -> None:
        nonlocal told
        if not told:
            typer.echo(f"quire: {error}; trying again", err=True)
        told = True

    return Client(target, resume_timeout_s=resume_timeout_s, on_break=tell)
